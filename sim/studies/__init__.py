"""Questions over many steps: sweeps, weeks with failures, batch plans, distillation, measured runs."""
