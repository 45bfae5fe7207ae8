"""Puts a process of untrusted tools into a sandbox: what it may do, and the layers that enforce it."""

from toolbus.parts.dropin.sandbox.main_thread import run_beside_main
from toolbus.parts.dropin.sandbox.process_limits import CpuGuard
from toolbus.parts.dropin.sandbox.sandbox import Protection, apply, clean_environment, granted_secrets
from toolbus.parts.dropin.sandbox.sandbox_grants import SandboxGrants

__all__ = [
    # What a process may do, and putting it into its sandbox
    "SandboxGrants",
    "Protection",
    "apply",
    # Running its tools and their calls
    "run_beside_main",
    "CpuGuard",
    # Its environment and its secrets
    "clean_environment",
    "granted_secrets",
]
