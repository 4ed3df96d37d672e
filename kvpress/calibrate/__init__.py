"""Fitting what a method needs to know about a model: run it over data, resumable, and write one file."""

from kvpress.calibrate.channels import ChannelSettings
from kvpress.calibrate.coupled import CoupledSettings
from kvpress.calibrate.queries import QuerySettings
from kvpress.calibrate.run import Settings, calibrate

METHODS: dict[str, type[Settings]] = {kind.method: kind for kind in (CoupledSettings, ChannelSettings, QuerySettings)}

__all__ = ["METHODS", "ChannelSettings", "CoupledSettings", "QuerySettings", "Settings", "calibrate"]
