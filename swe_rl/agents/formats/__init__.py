"""The table of action formats. A format is independent of the tools."""

from swe_rl.agents.formats.base import ActionFormat, FormatError, ParsedAction
from swe_rl.agents.formats.fence import FenceFormat
from swe_rl.agents.formats.hermes import HermesFormat
from swe_rl.agents.formats.xml import XmlFormat

FORMATS: dict[str, ActionFormat] = {"xml": XmlFormat(), "hermes": HermesFormat(), "fence": FenceFormat()}

__all__ = ["FORMATS", "ActionFormat", "FenceFormat", "FormatError", "HermesFormat", "ParsedAction", "XmlFormat"]
