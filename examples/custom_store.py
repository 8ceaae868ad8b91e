"""A store of one's own: which token most often followed each token, in all requests of a namespace so far.

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
    followers: defaultdict[int, Counter[int]]  # of the namespace
    last: int

    def __init__(self) -> None:
        self.tables: defaultdict[str, defaultdict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))

    def begin(self, prompt: np.ndarray, namespace: str = "") -> "BigramStore":
        view = copy(self)  # the tables are shared, the place in the text is the request's own
        view.followers, view.last = self.tables[namespace], int(prompt[-1])
        return view

    def propose(self, context: np.ndarray, budget: int) -> hierspec.Proposal:
        token = int(context[-1])
        guessed: list[int] = []
        while len(guessed) < budget and token in self.followers:
            token = self.followers[token].most_common(1)[0][0]
            guessed.append(token)
        return hierspec.Proposal.chain(guessed, self.name)

    def learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.followers[self.last][token] += 1
            self.last = token


if __name__ == "__main__":
    model = hierspec.load()
    model.add_store(BigramStore())
    plan = hierspec.Plan(stores=("context", "bigram"), budget=4)
    prompt = "Count from one to twenty in words, twice."
    answer = model.generate(prompt, plan=plan, max_tokens=120)
    print(answer.text)
    print(f"{answer.stats.tokens_per_pass:.2f} tokens per pass; guessed by {dict(answer.stats.tiers[0].accepted)}")
    print("identical to plain:", answer.tokens == model.generate(prompt, plan="plain", max_tokens=120).tokens)
