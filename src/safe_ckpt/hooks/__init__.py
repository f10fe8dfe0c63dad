"""Listeners to events: hooks that ``Telemetry`` enables, or that are given as ``hooks=``.

Each has a module of its own, which is imported when it is enabled.
"""

from __future__ import annotations

from safe_ckpt.config import Telemetry
from safe_ckpt.events import Hook


def asked_for(telemetry: Telemetry) -> list[Hook]:
    """The hooks that the settings name. For rank 0, on the thread that trains.

    Raises:
        ConfigError: one of them cannot work; says what to do.
    """
    hooks: list[Hook] = []
    if telemetry.prometheus_textfile is not None:
        from safe_ckpt.hooks.prometheus import PrometheusHook

        hooks.append(PrometheusHook(telemetry.prometheus_textfile))
    if telemetry.opentelemetry:
        from safe_ckpt.hooks.opentelemetry import OpenTelemetryHook

        hooks.append(OpenTelemetryHook())
    return hooks
