"""Is every answer within a JSON schema valid, the text of plain decoding, and faster than it?

Schemas are written by hand and made up by a seed: nested objects, enums, patterns, unions, numbers with bounds, letters
of many alphabets, references. Each is answered plainly and under a plan, in turn, greedily and sampled by turns. An
answer must be the same under both, and valid unless `--max-tokens` cut it. The last line is one JSON document. It made
docs/results/structured.json.

example:
  python experiments/structured.py --schemas 300 --output structured.json
  python experiments/structured.py --schemas 20 --plan lookup
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hierspec
from hierspec import Generation, Grammar, LanguageModel, Sampling
from hierspec.machine import machine

Schema = dict[str, Any]

WORDS = (
    *("name", "age", "city", "email", "title", "price", "tags", "status", "größe", "année", "名前", "улица", "score"),
    *(
        "isActive",
        "first_name",
        "zip-code",
        "address",
        "items",
        "notes",
        "id",
        "emoji 🎉",
        "created at",
        "parent",
        "unit",
    ),
)
CHOICES = (
    ["red", "green", "blue"],
    ["low", "medium", "high", None],
    ["Köln", "東京", "São Paulo", "Москва"],
    ["🎉", "🚀", "❤️"],
    [1, 2, 3, "many"],
    ["pending", "paid", "shipped", "returned"],
)
PATTERNS = (
    "^[A-Z]{3}-[0-9]{4}$",
    "^[a-z]{3,8}$",
    "^\\+?[0-9]{6,9}$",
    "^#[0-9a-f]{6}$",
    "^[äöü]{2,4}$",
    "^(yes|no|maybe)$",
)
TOPICS = ("a person", "an order", "a city", "a book", "a film", "a recipe", "a company", "a sensor", "a trip", "a game")


def closed(properties: Schema, required: Sequence[str] | None = None, **others: Any) -> Schema:
    """An object with these properties and no others."""
    needed = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **others}


TEXT, WHOLE = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0, "maximum": 999}
SHAPES = [closed({"kind": {"const": "circle"}, "r": WHOLE}), closed({"kind": {"const": "box"}, "w": WHOLE, "h": WHOLE})]
SHARE, FIVES = {"type": "number", "minimum": 0, "maximum": 1}, {"type": "integer", "multipleOf": 5, "maximum": 100}
BY_HAND: tuple[Schema, ...] = (
    closed({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 130}}),
    closed({"sentiment": {"enum": ["positive", "negative", "neutral"]}, "confidence": SHARE}),
    closed({"function": {"const": "get_weather"}, "arguments": closed({"city": TEXT, "unit": {"enum": ["C", "F"]}})}),
    closed({"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "paid": {"type": "boolean"}}),
    closed({"date": {"type": "string", "format": "date"}, "time": {"type": "string", "format": "time"}}),
    {"anyOf": SHAPES},
    {"type": "array", "items": closed({"word": TEXT, "count": WHOLE}), "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [TEXT, WHOLE, {"type": "boolean"}], "items": False, "minItems": 3},
    {
        "$defs": {"node": closed({"v": WHOLE, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    {"allOf": [closed({"a": WHOLE, "b": TEXT}, ["a"]), {"required": ["b"]}]},
    closed({"größe": {"enum": ["klein", "größer", "日本", "🎉"]}, "名前": {"type": "string", "maxLength": 6}}),
    closed({"n": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 3.25}, "m": FIVES}),
    closed({"a": WHOLE, "b": TEXT, "c": {"type": "null"}}, ["a"]),
    {"enum": ["yes", "no", "né", 7, None, {"deep": [1, 2]}]},
    {"type": ["string", "null"], "maxLength": 12},
    closed({'quote " and \\ slash': {"type": "boolean"}, "tab\there": {"type": "null"}}),
)


def made_up(generator: random.Random, depth: int = 0) -> Schema:
    """A random schema from a generator."""
    leaf = depth >= 2 or generator.random() < 0.45 * depth
    if leaf:
        return generator.choice(
            (
                {"type": "string", "minLength": generator.randint(0, 3), "maxLength": generator.randint(6, 30)},
                {"type": "string", "pattern": generator.choice(PATTERNS)},
                {"type": "integer", "minimum": generator.randint(-50, 0), "maximum": generator.randint(1, 5000)},
                {"type": "number", "minimum": generator.randint(-5, 0), "exclusiveMaximum": generator.randint(1, 40)},
                {"type": "boolean"},
                {"enum": list(generator.choice(CHOICES))},
                {"const": generator.choice(WORDS)},
                {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
            )
        )
    kind = generator.random()
    if depth and kind < 0.25:
        least = generator.randint(0, 2)
        return {"type": "array", "items": made_up(generator, depth + 1), "minItems": least, "maxItems": least + 2}
    if depth and kind < 0.4:
        return {"anyOf": [made_up(generator, depth + 1) for _ in range(2)]}
    names = generator.sample(WORDS, generator.randint(2, 4))
    properties = {name: made_up(generator, depth + 1) for name in names}
    required = names if generator.random() < 0.7 else generator.sample(names, len(names) - 1)
    return closed(properties, [name for name in names if name in required])


def schemas(count: int, seed: int) -> list[Schema]:
    """Hand-written schemas first, then random ones."""
    generator = random.Random(seed)
    return [*BY_HAND[:count], *(made_up(generator) for _ in range(count - len(BY_HAND)))]


def is_valid(text: str, schema: Schema) -> bool:
    from jsonschema import Draft202012Validator

    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def compare(
    models: dict[str, LanguageModel], number: int, schema: Schema, max_tokens: int, seed: int
) -> dict[str, Any]:
    """One schema, answered under every plan."""
    sampling = Sampling(
        max_tokens=max_tokens, temperature=0.8 * (number % 2), seed=seed + number, grammar=Grammar.json_schema(schema)
    )
    prompt = f"Make up an example of {TOPICS[number % len(TOPICS)]}. Answer as JSON."
    answers: dict[str, Generation] = {}
    plans = list(models)
    for plan in plans if number % 2 else plans[::-1]:
        models[plan].forget()
        answers[plan] = models[plan].generate(prompt, plan=plan, sampling=sampling)
    plain, drafted = answers.values() if number % 2 else list(answers.values())[::-1]
    stats = drafted.stats.tiers[0]
    return {
        "schema": schema,
        "text": plain.text,
        "tokens": len(plain.tokens),
        "ended": plain.ended,
        "same": plain.tokens == drafted.tokens,
        "valid": plain.ended == "length" or is_valid(plain.text, schema),
        "seconds": {plan: answer.seconds for plan, answer in answers.items()},
        "first_seconds": {plan: answer.first_seconds for plan, answer in answers.items()},
        "passes": stats.calls,
        "forced": [stats.proposed.get("grammar", 0), stats.accepted.get("grammar", 0)],
    }


def speeds(done: Sequence[dict[str, Any]], plan: str) -> dict[str, float]:
    tokens = sum(each["tokens"] for each in done)
    seconds = sum(each["seconds"][plan] for each in done)
    first = sum(each["first_seconds"][plan] for each in done)
    return {
        "tokens_per_second": round(tokens / seconds, 2),
        "decode_tokens_per_second": round((tokens - len(done)) / max(seconds - first, 1e-9), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder, a GGUF file or a hub name (the default model)")
    parser.add_argument("--schemas", type=int, default=300, help="how many (300)")
    parser.add_argument("--plan", default="auto", help="compared with plain (auto)")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the result to this JSON file too")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as stores:
        model = hierspec.load(arguments.model, weights=arguments.weights, stores=stores, keep_learnt=False)
        models = {"plain": model.apart(), arguments.plan: model}
        for plan, its_model in models.items():  # the first passes of a process pay for page faults and threads
            its_model.generate("Hello", plan=plan, max_tokens=8, json=True)
        done: list[dict[str, Any]] = []
        for number, schema in enumerate(schemas(arguments.schemas, arguments.seed)):
            done.append(compare(models, number, schema, arguments.max_tokens, arguments.seed))
            each = done[-1]
            if not (each["same"] and each["valid"]):
                print(json.dumps(each, ensure_ascii=False), file=sys.stderr, flush=True)
    by_plan = {plan: speeds(done, plan) for plan in models}
    decoding = [by_plan[plan]["decode_tokens_per_second"] for plan in models]
    document = {
        "command": "python experiments/structured.py " + shlex.join(sys.argv[1:]),
        "machine": machine(),
        "model": model.name,
        "weights": model.weights,
        "schemas": len(done),
        "same_texts": sum(each["same"] for each in done),
        "valid": sum(each["valid"] for each in done),
        "cut_by_length": sum(each["ended"] == "length" for each in done),
        "tokens": sum(each["tokens"] for each in done),
        "passes": sum(each["passes"] for each in done),
        "forced_drafted_and_accepted": [sum(each["forced"][index] for each in done) for index in (0, 1)],
        "speeds": by_plan,
        "times_plain": round(decoding[1] / decoding[0], 3),
        "answers": done,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in document.items() if name != "answers"}))
    return 0 if all(each["same"] and each["valid"] for each in done) else 1


if __name__ == "__main__":
    sys.exit(main())
