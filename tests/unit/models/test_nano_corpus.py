"""The nano tokenizer knows the calls of the toolset that it was built for."""

from __future__ import annotations

import pytest

from swe_rl.agents.formats import FORMATS
from swe_rl.models import nano_corpus
from swe_rl.models.nano import build_tokenizer
from swe_rl.tasks.oracle_calls import RUN_TESTS, Replacement, edit_call, look_call, run_call, submit_call

EDIT = Replacement(path="a.py", old="a\n", new="b\n", first_line=1, last_line=1)


@pytest.mark.parametrize("toolset", ["minimal", "r2e", "sweagent", "nebius", "bash"])
def test_tags_of_a_toolset_are_single_tokens(toolset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano_corpus, "NUM_TASKS", 20)
    words = nano_corpus.whole_words(toolset)
    tokenizer = build_tokenizer(nano_corpus.texts(toolset), vocab_size=1024, whole_words=words)
    calls = (run_call(toolset, RUN_TESTS), look_call(toolset, "a.py", 1, 2), edit_call(toolset, EDIT))
    for call in (*calls, submit_call(toolset)):
        text = FORMATS["xml"].render(call.name, call.arguments)
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text)]
        assert "".join(pieces) == text
        for tag in (f"<function={call.name}>", *(f"<parameter={key}>" for key in call.arguments), "</function>"):
            assert tag in pieces, (toolset, tag)


def test_the_command_that_runs_tests_is_short_for_the_toolset_that_writes_it() -> None:
    lengths = {}
    for toolset in ("minimal", "r2e"):
        words = nano_corpus.whole_words(toolset)
        tokenizer = build_tokenizer(nano_corpus.texts(toolset), vocab_size=1024, whole_words=words)
        lengths[toolset] = len(tokenizer.encode(RUN_TESTS))
    assert lengths["r2e"] <= 0.6 * lengths["minimal"], lengths
