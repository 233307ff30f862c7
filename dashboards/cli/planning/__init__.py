"""Commands that predict and plan without running anything: recommend, estimate, fit, gamma."""
