"""Device code only: functions under ``@triton.jit``. Launchers and checks are one folder up."""
