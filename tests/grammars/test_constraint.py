"""What a grammar allows: compared with what its bytes allow token by token, and free of what was asked before."""

import json
import re

import numpy as np
import pytest
from grammar_tokenizers import byte_level, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.errors import HierspecError
from hierspec.core.grammar import Grammar
from hierspec.core.proposal import CERTAIN, NOTHING, Proposal
from hierspec.grammars.compiler import GrammarCompiler

BYTES, PIECES = byte_level(), sentencepiece()
COMPILERS = {
    "bytes": GrammarCompiler(BYTES, BYTES.vocabulary_size),
    "pieces": GrammarCompiler(PIECES, PIECES.vocabulary_size + 5),  # a head may have more rows than there are tokens
}
TOKENIZERS = {"bytes": BYTES, "pieces": PIECES}
OBJECT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 12, "日本", None, True]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
GRAMMARS = [OBJECT, Grammar("regex", "[ab]{2,5}(é|日本)*"), Grammar.choice(["yes", "no", "née", "日", "🎉!"])]


def constraint(kind, grammar):
    return COMPILERS[kind].constraint(grammar, TOKENIZERS[kind].stop_ids)


def tokens_of(bits):
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


def allowed(which, written, proposal=NOTHING):
    rows = which.allowed(np.array(written, np.int32), proposal)
    return [None if row is None else tokens_of(row) for row in rows]


def completions(pattern, alphabet, longest):
    """All texts over an alphabet that a pattern matches."""
    texts, found = [""], set()
    for _ in range(longest + 1):
        found |= {text for text in texts if re.fullmatch(pattern, text)}
        texts = [text + letter for text in texts for letter in alphabet]
    return found


def by_brute_force(kind, texts, written):
    """Which tokens keep the text a beginning of one of these texts; a stop token where it is one of them."""
    tokenizer = TOKENIZERS[kind]
    spelled = {text.encode() for text in texts}

    def data(ids):
        return b"".join(tokenizer.opening_piece(i) if n == 0 else tokenizer.piece(i) for n, i in enumerate(ids))

    def shown(ids):
        raw = data(ids)
        for _ in range(tokenizer.decoding.leading_spaces):
            raw = raw.removeprefix(b" ")
        return raw

    before = shown(written)
    fitting = {
        token
        for token in range(tokenizer.vocabulary_size)
        if tokenizer.piece(token)
        and len(shown([*written, token])) > len(before)
        and any(text.startswith(shown([*written, token])) for text in spelled)
    }
    return fitting | ({tokenizer.stop_ids[0]} if before in spelled else set())


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("choices", [["yes", "no", "née"], ["ab", "abab", "aba", "né"], ["日本", "日", "🎉", "é"]])
def test_exactly_what_keeps_a_text_possible_is_allowed(kind, choices):
    """For every beginning that can be written. Of characters that are forced one way to write them is enough."""
    which = constraint(kind, Grammar.choice(choices))
    waiting, seen = [[]], 0
    while waiting and seen < 400:
        written, seen = waiting.pop(), seen + 1
        [masked] = allowed(which, written)
        possible = by_brute_force(kind, choices, written)
        assert masked <= possible
        assert masked == possible or len(masked) == 1, (written, masked, possible)
        waiting += [[*written, token] for token in masked if token not in TOKENIZERS[kind].stop_ids]
    assert seen > 4


def test_a_regular_expression_allows_what_it_matches():
    which, texts = constraint("bytes", Grammar("regex", "(ab|ba){1,2}")), completions("(ab|ba){1,2}", "ab", 4)
    waiting = [[]]
    while waiting:
        written = waiting.pop()
        [masked] = allowed(which, written)
        assert masked == by_brute_force("bytes", texts, written) or len(masked) == 1
        waiting += [[*written, token] for token in masked if token != 0]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@settings(max_examples=25, deadline=None)
@given(choices=st.lists(st.integers(0, 10_000), max_size=60), seed=st.integers(0, 1000))
def test_nothing_that_was_asked_before_changes_an_answer(kind, grammar, choices, seed):
    """A walk with drafts of every kind on the way, those that are forbidden and those across the end among them,
    allows what a walk without any allows."""
    generator = np.random.default_rng(seed)
    drafted, straight, written = constraint(kind, grammar), constraint(kind, grammar), []
    for choice in choices:
        [masked] = allowed(straight, written)
        size = int(generator.integers(1, 8))
        tokens = [
            int(generator.choice(sorted(masked))) if generator.random() < 0.7 else int(generator.integers(259))
            for _ in range(size)
        ]
        draft = Proposal(tuple(tokens), tuple(int(generator.integers(-1, node)) for node in range(size)))
        rows = allowed(drafted, written, draft)
        assert rows[0] == masked
        drafted.pruned(np.array(written, np.int32), draft)
        drafted.forced(np.array(written, np.int32), 9)
        for node in range(size):
            path = draft.path(node)
            if rows[node + 1] is not None:
                fresh = constraint(kind, grammar)
                assert rows[node + 1] == allowed(fresh, [*written, *path])[0]
        token = sorted(masked)[choice % len(masked)]
        if token in TOKENIZERS[kind].stop_ids:
            break
        written.append(token)
        for each in (drafted, straight):
            each.wrote([token])


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_forced_tokens_are_allowed_and_certain_ones_are_the_only_ones(kind, grammar):
    generator = np.random.default_rng(3)
    for _ in range(10):
        which, written = constraint(kind, grammar), []
        while True:
            forced = which.forced(np.array(written, np.int32), 12)
            rows = allowed(which, written, forced)
            for node, (token, evidence) in enumerate(zip(forced.tokens, forced.evidence, strict=True)):
                assert token in rows[node]
                if evidence == CERTAIN:
                    assert rows[node] == {token}
            token = int(generator.choice(sorted(rows[0])))
            if token in TOKENIZERS[kind].stop_ids:
                break
            written.append(token)
            which.wrote([token])


def test_a_stop_token_is_allowed_exactly_where_the_text_is_complete():
    which = constraint("bytes", Grammar("regex", "a{2,3}"))
    stop, a = 0, BYTES.encode("a")[0]
    assert [stop in row for row in allowed(which, [], Proposal.chain([a, a, a]))] == [False, False, True, True]
    assert allowed(which, [a, a, a]) == [{stop}]


def test_nothing_follows_a_stop_token_or_a_forbidden_one():
    which = constraint("bytes", Grammar("regex", "a{2,3}"))
    stop, a, b = 0, *BYTES.encode("a"), *BYTES.encode("b")
    draft = Proposal((a, a, stop, a, b, a), (-1, 0, 1, 2, 1, 4))
    rows = allowed(which, [], draft)
    assert [row is None for row in rows] == [False, False, False, True, True, True, True]
    assert which.pruned(np.array([], np.int32), draft).tokens == (a, a, stop)


def test_a_sampled_draft_stays_though_it_is_forbidden():
    which, b = constraint("bytes", Grammar("regex", "a+")), BYTES.encode("b")[0]
    draft = Proposal((b,), (-1,), ("?",), (np.full(300, 1 / 300),))
    assert which.pruned(np.array([], np.int32), draft) is draft


def test_tokens_that_hold_part_of_a_character_are_allowed_only_where_they_fit():
    which = constraint("bytes", Grammar.choice(["日本", "日記"]))
    text, written = "日記".encode(), []
    for byte in text:
        token = next(token for token in range(1, 257) if BYTES.piece(token) == bytes([byte]))
        [row] = allowed(which, written)
        if token not in row:  # the whole character is forced as one token
            assert len(row) == 1
            return
        written.append(token)
    assert allowed(which, written) == [{0}]


def test_a_sentencepiece_text_begins_with_or_without_its_space():
    which = constraint("pieces", Grammar.choice(["yes", "no"]))
    [row] = allowed(which, [])
    spelled = {PIECES._token(token) for token in row}
    assert {"▁yes", "yes", "▁no", "no"} <= spelled
    assert "▁" not in spelled
    yes = PIECES.token_id("▁yes")
    which.wrote([yes])
    assert allowed(which, [yes]) == [{1}]


def test_a_vocabulary_can_be_read_before_the_first_grammar(monkeypatch):
    compiler = GrammarCompiler(BYTES, BYTES.vocabulary_size)
    compiler.prepare()
    monkeypatch.setattr("hierspec.grammars.compiler.TokenBytes", None)
    compiler.constraint(Grammar("regex", "a+"), [0])


def test_a_grammar_is_compiled_once(monkeypatch):
    compiler = GrammarCompiler(BYTES, BYTES.vocabulary_size)
    compiled = []
    monkeypatch.setattr(
        compiler, "_compiled", lambda grammar: compiled.append(grammar) or COMPILERS["bytes"]._compiled(grammar)
    )
    for _ in range(3):
        compiler.constraint(Grammar("regex", "a+"), [0])
    assert compiled == [Grammar("regex", "a+")]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "a("),
        Grammar("lark", "nonsense ::"),
        Grammar.json_schema({"type": "objekt"}),
        Grammar.json_schema({"not": {"type": "string"}}),
        Grammar.json_schema({"$ref": "#/$defs/nowhere"}),
        Grammar.json_schema(False),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_in_a_sentence(grammar):
    with pytest.raises(HierspecError) as refused:
        constraint("bytes", grammar)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


def test_a_model_without_a_stop_token_is_refused():
    with pytest.raises(HierspecError, match="stop token"):
        COMPILERS["bytes"].constraint(Grammar("regex", "a+"), [])


def test_stop_ids_of_a_request_that_are_characters_are_text():
    a, b = BYTES.encode("a")[0], BYTES.encode("b")[0]
    which = COMPILERS["bytes"].constraint(Grammar("regex", "ab"), [0], [b])
    assert allowed(which, [a]) == [{b}]


def test_what_is_missing_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(HierspecError, match=re.escape("pip install 'hierspec[grammar]'")):
        GrammarCompiler(BYTES, BYTES.vocabulary_size).constraint(Grammar("regex", "a"), [0])


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-999, 999) | st.text('ab é日🎉"\\', max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=3),
        max_leaves=6,
    )
)
def test_every_json_document_can_be_written(kind, value):
    """Byte by byte where need be: as Python writes it, keys in their order."""
    which, tokenizer = constraint(kind, Grammar.json_schema(True)), TOKENIZERS[kind]
    written, text = [], json.dumps(value, ensure_ascii=False).encode()
    shown = b""
    while shown != text:
        [row] = allowed(which, written)
        piece = tokenizer.opening_piece if not written else tokenizer.piece
        drop = tokenizer.decoding.leading_spaces if not written else 0
        spelled = {token: piece(token).removeprefix(b" " * drop) for token in row if token not in tokenizer.stop_ids}
        fitting = [token for token, data in spelled.items() if data and text[len(shown) :].startswith(data)]
        assert fitting, (shown, text)
        token = min(fitting, key=lambda each: len(spelled[each]))
        shown += spelled[token]
        written.append(token)
    assert tokenizer.stop_ids[0] in allowed(which, written)[0]
    assert tokenizer.decode(written) == text.decode()
