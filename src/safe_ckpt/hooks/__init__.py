"""Hooks that are ready to use: what ``Telemetry`` asks for, or given as ``hooks=`` by hand.

Each lives in a module of its own, which is imported when it is asked for.
"""

from __future__ import annotations

from safe_ckpt.config import Telemetry
from safe_ckpt.events import Hook


def asked_for(telemetry: Telemetry) -> list[Hook]:
    """The hooks that the settings name. For rank 0, on the thread that trains.

    Raises:
        ConfigError: one of them cannot work; says what to do.
    """
    found: list[Hook] = []
    if telemetry.prometheus_textfile is not None:
        from safe_ckpt.hooks.prometheus import PrometheusHook

        found.append(PrometheusHook(telemetry.prometheus_textfile))
    if telemetry.opentelemetry:
        from safe_ckpt.hooks.opentelemetry import OpenTelemetryHook

        found.append(OpenTelemetryHook())
    return found
