"""A custom store: the token that most often followed each token, over all requests of a namespace.

Run it with `python examples/custom_store.py`. To use it by name in plans, a package registers it in pyproject.toml:

    [project.entry-points."hierspec.stores"]
    bigram = "my_package:BigramStore"
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from copy import copy

import numpy as np

import hierspec


class BigramStore(hierspec.Store):
    name = "bigram"
    followers: defaultdict[int, Counter[int]]  # token -> counts of the next one, per namespace
    last: int  # token, per request

    def __init__(self) -> None:
        self.tables: defaultdict[str, defaultdict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))

    def begin(self, prompt: np.ndarray, namespace: str = "") -> "BigramStore":
        view = copy(self)  # the tables are shared, the last token is per request
        view.followers, view.last = self.tables[namespace], int(prompt[-1])
        return view

    def propose(self, context: np.ndarray, budget: int) -> hierspec.Proposal:
        token = int(context[-1])
        draft: list[int] = []
        while len(draft) < budget and token in self.followers:
            token = self.followers[token].most_common(1)[0][0]
            draft.append(token)
        return hierspec.Proposal.chain(draft, self.name)

    def learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.followers[self.last][token] += 1
            self.last = token


if __name__ == "__main__":
    model = hierspec.load()
    model.add_store(BigramStore())
    stores = {"plain": (), "context": ("context",), "context + bigram": ("context", "bigram")}
    plans = {name: hierspec.Plan(stores=names, budget=8, merge=True, adapt=True) for name, names in stores.items()}
    answers: dict[str, list[hierspec.Generation]] = {name: [] for name in plans}
    for dish in ("tomato", "carrot", "potato", "onion", "leek"):  # the store learns from earlier answers only
        for name, plan in plans.items():
            answers[name].append(model.generate(f"Give me a recipe for {dish} soup.", plan=plan, max_tokens=64))
    for name, written in answers.items():
        tokens, passes = sum(len(answer.tokens) for answer in written), sum(answer.stats.passes for answer in written)
        seconds = sum(answer.seconds for answer in written)
        print(f"{name:17} {tokens / passes:.2f} tokens per pass, {tokens / seconds:.1f} tokens/s")
    texts = [[answer.text for answer in written] for written in answers.values()]
    print("identical to plain:", texts[1:] == [texts[0]] * 2)
