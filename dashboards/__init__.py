"""Every face people see: the `ridgeplan` command, the charts and the Streamlit page."""
