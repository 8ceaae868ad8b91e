"""The model's own chat, written in large batches: what its drafts should learn to guess.

Every row is one text that grows by one token a step, so all rows stand at the same position and nothing is ragged.
User turns are sampled from the model itself after the template's opening, or given (whole, or their first words);
answers are greedy in one half of the rows and sampled at 0.8 in the other. `script` holds what is decided in
advance: tokens to come that the model does not choose.
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
from hierspec.train.network import Network

_USER_TEMPERATURE, _ANSWER_TEMPERATURE = 1.0, 0.8
_LONGEST_USER, _LONGEST_ANSWER = 200, 400  # tokens of a turn before it is cut
_GOLDEN = (5**0.5 - 1) / 2
_ROLES = ("user", "assistant", "user")
_MARKS = ("MARK-ONE", "MARK-TWO", "MARK-THREE")

# First words of user turns, so that every family of tasks is there; the model itself goes on from them.
OPENINGS = (
    "Translate the following sentence to English:", "Translate German to English:", "Translate this French text:",
    "Summarize the following text:", "Summarize this article in three sentences:", "Give a short summary of",
    "Answer the question using the passage below.\n\n", "Read the passage and answer.\n\nPassage:",
    "Given the following documents, answer the question.", "Who was", "What is the", "When did", "Where is", "Why do",
    "How does", "How many", "Explain", "Compare", "Write a short story about", "Write an email to", "Compose a poem",
    "Write a Python function that", "Fix this code:\n```python\n", "Solve this step by step:", "If a train",
    "A farmer has", "Calculate", "Convert", "List five", "Rewrite the following sentence", "Correct the grammar:",
    "Classify", "Extract the names from the following text:", "Imagine you are", "Describe", "Act as", "Suggest",
)  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """Rows of tokens [rows, length] and which of them [rows, length] the model wrote as answers."""

    tokens: Tensor  # int32
    answers: Tensor  # bool

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def joined(parts: Sequence[Texts]) -> Texts:
        return Texts(torch.cat([part.tokens for part in parts]), torch.cat([part.answers for part in parts]))


@dataclass(frozen=True)
class Template:
    """A chat template as token ids: what stands before a user's words, after them, and before the next user's."""

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


def synthesise(
    network: Network, tokenizer: Tokenizer, rows: int, length: int = 640, prompts: Sequence[str] = (), seed: int = 0,
    batch: int = 2048, progress: Progress = silent, given: float = 1 / 3,
) -> Texts:  # fmt: skip
    """`rows` conversations of `length` tokens: a share `given` begins with one of the prompts (where there are any);
    of the rest one half begins with the first words of a task, the other freely."""
    template, generator = Template.of(tokenizer), torch.Generator().manual_seed(seed)
    parts = []
    for start in range(0, rows, batch):
        count = min(batch, rows - start)
        starts: list[tuple[list[int], bool]] = []  # words of the first user turn, and whether they are all of it
        for place in range(start, start + count):
            chosen = int(torch.randint(1 << 30, (1,), generator=generator))
            # Steps of the golden ratio spread any share evenly.
            if prompts and place * _GOLDEN % 1 < given:
                starts.append((tokenizer.encode(prompts[chosen % len(prompts)], begin=False)[: length // 2], True))
            elif chosen // len(OPENINGS) % 2:
                starts.append((tokenizer.encode(OPENINGS[chosen % len(OPENINGS)], begin=False), False))
            else:
                starts.append(([], False))
        greedy = torch.arange(count) % 2 == 0
        parts.append(_written(network, template, starts, greedy, length, seed + start, start, rows, progress))
    return Texts.joined(parts)


def greedy_answers(
    network: Network, tokenizer: Tokenizer, prompts: Sequence[str], most: int = 128, progress: Progress = silent
) -> Texts:
    """What the model answers to each prompt: `most` tokens at most, in texts as long as the longest needs."""
    template = Template.of(tokenizer)
    asked = [(tokenizer.encode(prompt, begin=False), True) for prompt in prompts]
    around = len(template.opening) + len(template.to_answer)
    length = max(len(words) for words, _ in asked) + around + most
    texts = _written(
        network, template, asked, torch.ones(len(asked), dtype=torch.bool), length, 0, 0, len(asked), progress
    )
    # Only the first answer counts, and of it as much as a user would have asked for.
    places = torch.arange(length)[None, :]
    starts = torch.tensor([[len(words) + around] for words, _ in asked])
    ends = (texts.tokens == template.to_answer[0]) & (places >= starts)
    ended = ends.int().cumsum(1) - ends.int() > 0
    return Texts(texts.tokens, texts.answers & (places < starts + most) & ~ended)


@torch.inference_mode()
def _written(
    network: Network, template: Template, starts: Sequence[tuple[list[int], bool]], greedy: Tensor, length: int,
    seed: int, before: int, rows: int, progress: Progress,
) -> Texts:  # fmt: skip
    config, device, count = network.config, network.embedding.device, len(starts)
    generator = torch.Generator(device).manual_seed(seed)
    greedy = greedy.to(device)
    script = torch.full((count, length + 64), -1, dtype=torch.long)
    answering = torch.zeros(count, dtype=torch.bool)
    for row, (words, whole) in enumerate(starts):
        given = [*template.opening, *words, *(template.to_answer if whole else ())][:length]
        script[row, : len(given)] = torch.tensor(given)
        answering[row] = whole
    script, answering = script.to(device), answering.to(device)
    turn_start = (script[:, :length] >= 0).sum(1)  # where the present turn's own words begin
    followers = [torch.tensor(part[1:], device=device) for part in (template.to_answer, template.to_user)]
    stop = template.to_answer[0]
    stops = torch.tensor(sorted({stop, *config.eos_ids}), device=device)
    memory = torch.zeros(
        config.layers, 2, count, config.kv_heads, length, config.head_size, dtype=network.embedding.dtype, device=device
    )
    tokens = script[:, :length].clone()
    answers = torch.zeros(count, length, dtype=torch.bool, device=device)
    for place in range(length - 1):
        logits = _step(network, tokens[:, place], memory, place)
        logits[:, stops] = torch.where(
            torch.isin(stops, stop)[None, :], logits[:, stops].logsumexp(1, keepdim=True), -torch.inf
        )  # one token ends turns, whichever the model would have taken
        noise = torch.empty_like(logits).exponential_(generator=generator).clamp_(min=1e-20).log_().neg_()  # Gumbel
        warmth = torch.where(answering, _ANSWER_TEMPERATURE, _USER_TEMPERATURE)
        warmth = torch.where(answering & greedy, 0.0, warmth)[:, None]
        chosen = (logits + warmth * noise).argmax(1)
        most = torch.where(answering, _LONGEST_ANSWER, _LONGEST_USER)
        chosen = torch.where(place + 1 - turn_start >= most, stop, chosen)
        decided = script[:, place + 1]
        free = decided < 0
        tokens[:, place + 1] = torch.where(free, chosen, decided)
        answers[:, place + 1] = free & answering
        ended = free & (chosen == stop)
        for state, follow in ((False, followers[0]), (True, followers[1])):
            which = (ended & (answering == state)).nonzero()[:, 0]
            space = script.shape[1] - place - 2
            script[which, place + 2 : place + 2 + len(follow)] = follow[:space]
            turn_start[which] = place + 2 + len(follow)
        answering = answering ^ ended
        if place % 32 == 0:
            progress("Writing conversations", before + count * place // length, rows)
    progress("Writing conversations", before + count, rows)
    return Texts(tokens.int().cpu(), answers.cpu())


def _step(network: Network, tokens: Tensor, memory: Tensor, place: int) -> Tensor:
    """Logits [rows, vocabulary] in float32 of what follows these tokens at position `place`."""
    config, x = network.config, functional.embedding(tokens, network.embedding)[:, None]
    rotation = network.rotation(place, place + 1)
    for number, block in enumerate(network.blocks):
        q, k, v = block.project(x, rotation)
        memory[number, 0, :, :, place] = k[:, :, 0]
        memory[number, 1, :, :, place] = v[:, :, 0]
        first = max(0, place + 1 - block.window) if block.window else 0
        keys, values = memory[number, :, :, :, first : place + 1]
        # The queries of one key head as so many rows: all of them see everything, and nothing is repeated.
        grouped = q.reshape(len(q), config.kv_heads, -1, config.head_size)
        with sdpa_kernel(NO_PLANS):
            seen = functional.scaled_dot_product_attention(grouped, keys, values)
        x = block.finish(x, seen.reshape(q.shape))
    return functional.linear(network.norm(x[:, 0]), network.head).float()
