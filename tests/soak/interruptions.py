"""Ctrl-C at random lines of hierspec: the text that follows is always plain decoding's, and no page is lost.

python tests/soak/interruptions.py --seed 7 --count 2000
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import PLANS, Lines, Subject, a_prompt, a_sampling, write
from soaking import Soak, main

from hierspec import Chat
from hierspec.core.sampling import Sampling


def attack(subject: Subject, rng: random.Random, soak: Soak) -> None:
    """Interrupt something, then go on from what it left."""
    plan = rng.choice(list(PLANS))
    kind = rng.choice(["one", "several", "chat", "forget"])
    action, following = _action(subject, rng, plan, kind)
    key = plan, kind
    first = rng.randrange(1, subject.sizes.get(key, 2000) + 1)
    lines = Lines(first, rng.randrange(1, 60) if rng.random() < 0.25 else 0)  # some press it twice
    with suppress(KeyboardInterrupt):
        lines.run(action)
    if not lines.hits:  # it has fewer lines than that
        subject.sizes[key] = lines.count
        return
    subject.sizes[key] = max(subject.sizes.get(key, 2000), 2 * first)
    what = f"{subject.name}, {plan}, {kind}, interrupted at {' and '.join(lines.hits)}"
    prompt, sampling, again = following()
    soak.count_one(what)
    if not subject.same(prompt, sampling, subject.plain(prompt, sampling), again(prompt, sampling)):
        soak.fail(f"{what}: another text afterwards")
    if trouble := subject.unbalanced(forget=rng.random() < 0.3):
        soak.fail(f"{what}: {trouble}")


def _action(subject: Subject, rng: random.Random, plan: str, kind: str):
    """What is interrupted, and what comes after it: a prompt, its sampling, and how it is answered."""
    model = subject.model
    sampling = a_sampling(rng, plan)
    if kind == "chat":
        chat = Chat(model, plan=PLANS[plan], sampling=sampling)
        words = rng.choice(["abc abc abc", "The end. The end.", "1 2 3 1 2 3"])

        def talk() -> None:
            for turn in range(2):
                answer = chat.say(f"{words} {turn}")
                try:
                    for _ in answer:
                        pass
                finally:
                    answer.close()  # type: ignore[attr-defined]

        def next_turn() -> tuple[list[int], Sampling, object]:
            ids = chat.ask("And then?")
            rendered = model.tokenizer.render_chat([*chat.messages, {"role": "user", "content": "And then?"}])
            decoded = model.tokenizer.decode(ids, special=True)
            if "\ufffd" not in decoded + rendered and decoded != rendered:
                return ids, sampling, lambda *_: ()  # another conversation: a failure
            return ids, sampling, lambda *_: _said(chat, "And then?")

        return talk, next_turn
    prompts = [a_prompt(rng) for _ in range(rng.randrange(2, 4) if kind == "several" else 1)]
    requests: list = []

    def generate() -> None:
        requests.extend(model.request(prompt, PLANS[plan], sampling) for prompt in prompts)
        write(requests)
        if kind == "forget":
            model.forget()

    def go_on() -> tuple[list[int], Sampling, object]:
        written = requests[0].output if requests else []
        prompt = [*prompts[0], *written, 77] if rng.random() < 0.7 else prompts[-1]
        return (
            prompt,
            sampling,
            lambda p, s: model.generate(p, plan=PLANS[rng.choice(["plain", plan])], sampling=s).tokens,
        )

    return generate, go_on


def _said(chat: Chat, text: str) -> tuple[int, ...]:
    for _ in chat.say(text):
        pass
    assert chat.last is not None
    return chat.last.tokens


def summary(soak: Soak) -> dict[str, object]:
    files = Counter(what.split("interrupted at ")[1].split(":")[0] for what in soak.what)
    return {"by_file": dict(files.most_common())}


if __name__ == "__main__":
    sys.exit(main("Ctrl-C at random lines", attack, 2000, summary))
