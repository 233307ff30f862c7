"""User interfaces: CLI, charts, Streamlit page."""
