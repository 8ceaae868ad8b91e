"""Conversations of the model with itself, written in large batches: what its drafts are trained on.

Every row is one text that grows by one token per step, so all rows are at the same position and nothing is ragged.
User turns are sampled from the model after the template's opening, or given (whole, or their first words); answers are
greedy in one half of the rows and sampled at 0.8 in the other. `forced` holds tokens that the model does not choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from hierspec.backends.torch.decoder import NO_PLANS
from hierspec.progress import Progress, silent
from hierspec.text.tokenizer import Tokenizer
from hierspec.train.network import Network, Rotation

_USER_TEMPERATURE, _ANSWER_TEMPERATURE = 1.0, 0.8
_LONGEST_USER, _LONGEST_ANSWER = 200, 400  # tokens of a turn before it is cut
_GOLDEN = (5**0.5 - 1) / 2  # steps of it spread any share evenly
_ROLES = ("user", "assistant", "user")
_MARKS = ("MARK-ONE", "MARK-TWO", "MARK-THREE")

# First words of user turns, so that every kind of task occurs; the model continues them.
OPENINGS = (
    "Translate the following sentence to English:",
    "Translate German to English:",
    "Translate this French text:",
    "Summarize the following text:",
    "Summarize this article in three sentences:",
    "Give a short summary of",
    "Answer the question using the passage below.\n\n",
    "Read the passage and answer.\n\nPassage:",
    "Given the following documents, answer the question.",
    "Who was",
    "What is the",
    "When did",
    "Where is",
    "Why do",
    "How does",
    "How many",
    "Explain",
    "Compare",
    "Write a short story about",
    "Write an email to",
    "Compose a poem",
    "Write a Python function that",
    "Fix this code:\n```python\n",
    "Solve this step by step:",
    "If a train",
    "A farmer has",
    "Calculate",
    "Convert",
    "List five",
    "Rewrite the following sentence",
    "Correct the grammar:",
    "Classify",
    "Extract the names from the following text:",
    "Imagine you are",
    "Describe",
    "Act as",
    "Suggest",
)


@dataclass(frozen=True)
class Texts:
    """Rows of tokens [rows, length], and which of them [rows, length] belong to answers of the model."""

    tokens: Tensor  # int32
    answers: Tensor  # bool

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def joined(parts: Sequence[Texts]) -> Texts:
        return Texts(torch.cat([part.tokens for part in parts]), torch.cat([part.answers for part in parts]))


@dataclass(frozen=True)
class Template:
    """A chat template as token ids: before a user's words, after them, and before the next user's words."""

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]  # begins with the token that ends a turn
    to_user: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> Template:
        messages = [{"role": role, "content": mark} for role, mark in zip(_ROLES, _MARKS, strict=True)]
        rendered = tokenizer.render_chat(messages)
        first, rest = rendered.split(_MARKS[0], 1)
        _, rest = rest.split(_MARKS[1], 1)
        between, last = rest.split(_MARKS[2], 1)

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, special=True, begin=False))

        return Template(ids(first), ids(last), ids(between))


@dataclass(frozen=True)
class UserStart:
    """The given first words of the first user turn."""

    tokens: list[int]
    complete: bool  # they are the whole turn


def synthesise(
    network: Network,
    tokenizer: Tokenizer,
    rows: int,
    length: int = 640,
    prompts: Sequence[str] = (),
    seed: int = 0,
    batch: int = 2048,
    progress: Progress = silent,
    given: float = 1 / 3,
) -> Texts:
    """`rows` conversations of `length` tokens.

    A share `given` starts with one of the prompts (if there are any). Of the rest, one half starts with the first words
    of a task, the other freely.
    """
    template, generator = Template.of(tokenizer), torch.Generator().manual_seed(seed)
    parts = []
    for first_row in range(0, rows, batch):
        count = min(batch, rows - first_row)
        starts = []
        for row in range(first_row, first_row + count):
            chosen = int(torch.randint(1 << 30, (1,), generator=generator))
            if prompts and row * _GOLDEN % 1 < given:
                prompt = tokenizer.encode(prompts[chosen % len(prompts)], begin=False)
                starts.append(UserStart(prompt[: length // 2], True))
            elif chosen // len(OPENINGS) % 2:
                starts.append(UserStart(tokenizer.encode(OPENINGS[chosen % len(OPENINGS)], begin=False), False))
            else:
                starts.append(UserStart([], False))
        greedy = torch.arange(count) % 2 == 0

        def within(what: str, done: int, total: int, before: int = first_row) -> None:
            progress(what, before + done, rows)

        parts.append(_conversations(network, template, starts, greedy, length, seed + first_row, within))
    return Texts.joined(parts)


def greedy_answers(
    network: Network, tokenizer: Tokenizer, prompts: Sequence[str], most: int = 128, progress: Progress = silent
) -> Texts:
    """The model's answer to each prompt, of at most `most` tokens. All texts are as long as the longest needs."""
    template = Template.of(tokenizer)
    starts = [UserStart(tokenizer.encode(prompt, begin=False), True) for prompt in prompts]
    around = len(template.opening) + len(template.to_answer)
    length = max(len(start.tokens) for start in starts) + around + most
    texts = _conversations(network, template, starts, torch.ones(len(starts), dtype=torch.bool), length, 0, progress)
    # Only the first answer counts, up to `most` tokens.
    positions = torch.arange(length)[None, :]
    answer_starts = torch.tensor([[len(start.tokens) + around] for start in starts])
    ends = (texts.tokens == template.to_answer[0]) & (positions >= answer_starts)
    ended = ends.int().cumsum(1) - ends.int() > 0
    return Texts(texts.tokens, texts.answers & (positions < answer_starts + most) & ~ended)


@torch.inference_mode()
def _conversations(
    network: Network,
    template: Template,
    starts: Sequence[UserStart],
    greedy: Tensor,
    length: int,
    seed: int,
    progress: Progress,
) -> Texts:
    """One conversation for each start; `greedy` [rows] are those with greedy answers."""
    config, device, count = network.config, network.embedding.device, len(starts)
    generator = torch.Generator(device).manual_seed(seed)
    greedy = greedy.to(device)
    forced = torch.full((count, length + 64), -1, dtype=torch.long)
    answering = torch.zeros(count, dtype=torch.bool)
    for row, start in enumerate(starts):
        given = [*template.opening, *start.tokens, *(template.to_answer if start.complete else ())][:length]
        forced[row, : len(given)] = torch.tensor(given)
        answering[row] = start.complete
    forced, answering = forced.to(device), answering.to(device)
    turn_start = (forced[:, :length] >= 0).sum(1)  # where the words of the current turn start
    followers = [torch.tensor(part[1:], device=device) for part in (template.to_answer, template.to_user)]
    stop = template.to_answer[0]
    stops = torch.tensor(sorted({stop, *config.eos_ids}), device=device)
    memory = torch.zeros(
        config.layers, 2, count, config.kv_heads, length, config.head_size, dtype=network.embedding.dtype, device=device
    )
    tokens = forced[:, :length].clone()
    answers = torch.zeros(count, length, dtype=torch.bool, device=device)
    # Everything that a step needs is on the device before the first one, and no step waits for the device: so steps are
    # queued as fast as Python can launch kernels.
    cosines, sines = network.rotation(0, length)
    is_stop = torch.isin(stops, stop)[None, :]
    for position in range(length - 1):
        rotation = cosines[position : position + 1], sines[position : position + 1]
        logits = _step(network, tokens[:, position], memory, position, rotation)
        logits[:, stops] = torch.where(
            is_stop, logits[:, stops].logsumexp(1, keepdim=True), -torch.inf
        )  # one token ends turns, whichever the model would choose
        temperature = torch.where(answering, _ANSWER_TEMPERATURE, _USER_TEMPERATURE)
        temperature = torch.where(answering & greedy, 0.0, temperature)[:, None]
        # Gumbel-max in place: minus the log of exponential noise is Gumbel noise.
        noise = torch.empty_like(logits).exponential_(generator=generator).clamp_(min=1e-20).log_()
        chosen = logits.addcmul_(noise, temperature, value=-1.0).argmax(1)
        most = torch.where(answering, _LONGEST_ANSWER, _LONGEST_USER)
        chosen = torch.where(position + 1 - turn_start >= most, stop, chosen)
        given_next = forced[:, position + 1]
        free = given_next < 0
        tokens[:, position + 1] = torch.where(free, chosen, given_next)
        answers[:, position + 1] = free & answering
        ended = free & (chosen == stop)
        for was_answering, follow in ((False, followers[0]), (True, followers[1])):
            these = ended & (answering == was_answering)
            after = forced[:, position + 2 : position + 2 + len(follow)]
            after.copy_(torch.where(these[:, None], follow[: after.shape[1]], after))
            turn_start = torch.where(these, position + 2 + len(follow), turn_start)
        answering = answering ^ ended
        if position % 32 == 0:
            progress("Writing conversations", count * position // length, count)
    progress("Writing conversations", count, count)
    return Texts(tokens.int().cpu(), answers.cpu())


def _step(network: Network, tokens: Tensor, memory: Tensor, position: int, rotation: Rotation) -> Tensor:
    """Logits [rows, vocabulary] in float32 of what follows these tokens at this position."""
    config, x = network.config, functional.embedding(tokens, network.embedding)[:, None]
    for number, block in enumerate(network.blocks):
        q, k, v = block.project(x, rotation)
        memory[number, 0, :, :, position] = k[:, :, 0]
        memory[number, 1, :, :, position] = v[:, :, 0]
        first = max(0, position + 1 - block.window) if block.window else 0
        keys, values = memory[number, :, :, :, first : position + 1]
        # The queries of one key head become rows: all attend to all keys, and no key is repeated.
        grouped = q.reshape(len(q), config.kv_heads, -1, config.head_size)
        with sdpa_kernel(NO_PLANS):
            attention = functional.scaled_dot_product_attention(grouped, keys, values)
        x = block.finish(x, attention.reshape(q.shape))
    return functional.linear(network.norm(x[:, 0]), network.head).float()
