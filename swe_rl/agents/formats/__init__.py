"""The table of action formats. A format is independent of the tools."""

from swe_rl.agents.formats.base import ActionFormat, FormatError, ParsedAction
from swe_rl.agents.formats.xml import XmlFormat

FORMATS: dict[str, ActionFormat] = {"xml": XmlFormat()}

__all__ = ["FORMATS", "ActionFormat", "FormatError", "ParsedAction", "XmlFormat"]
