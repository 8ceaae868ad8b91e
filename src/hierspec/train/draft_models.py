"""Separate draft models for a target: few layers, narrow embeddings, the same token ids.

Each becomes an ordinary checkpoint, a folder that plans name as a draft. Several are trained at once: the target's pass
and its distributions are most of the work and serve all of them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hierspec.checkpoints.config import DecoderConfig, LayerConfig, expected_tensors
from hierspec.checkpoints.families import family_named, to_huggingface
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_folder
from hierspec.progress import Progress, silent
from hierspec.train.distillation import Distance, distances
from hierspec.train.loop import Settings, TrainingRun, fit
from hierspec.train.network import Network, as_written, compile_blocks
from hierspec.train.synthesise import Texts

Report = Callable[[int, float, dict[str, float]], None]
_HEAD_SIZE = 64  # numbers of an attention head
_EMBEDDED = 0.5  # initial root mean square of an embedding's numbers: the layers add about 1
_NOT_COPIED = ("config.json", "complete.json")
_BATCH = 8  # texts that are measured at once
# Layers and width: each takes two to three times as long as the one before, so that it may verify it.
LADDER = ((2, 256), (4, 384), (8, 512))


@dataclass(frozen=True)
class DraftShape:
    """How large a draft model is."""

    layers: int
    hidden: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.hidden < _HEAD_SIZE or self.hidden % _HEAD_SIZE:
            raise HierspecError(
                f"A draft model needs at least one layer and a width that is a multiple of {_HEAD_SIZE}, not "
                f"{self.layers} and {self.hidden}."
            )

    def config(self, target: DecoderConfig) -> DecoderConfig:
        """A Llama of this size with the target's token ids, context and rotary embedding."""
        heads = self.hidden // _HEAD_SIZE
        return DecoderConfig(
            family="llama",
            vocabulary=target.vocabulary,
            hidden=self.hidden,
            heads=heads,
            kv_heads=heads // 2 if heads % 2 == 0 else 1,
            head_size=_HEAD_SIZE,
            intermediate=round(8 / 3 * self.hidden / 64) * 64,
            norm_eps=target.norm_eps,
            context=target.context,
            tied=True,
            rotary=target.rotary,
            layer_configs=(LayerConfig(),) * self.layers,
            bos_id=target.bos_id,
            eos_ids=target.eos_ids,
        )


def new_model(config: DecoderConfig, target: Network, seed: int = 0) -> Network:
    """An untrained model: embeddings are the target's in their main directions, everything else is random."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape) if "norm" in name else torch.zeros(shape)
            continue
        # The more layers add to the residual stream, the smaller each addition starts.
        last = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = shape[1] ** -0.5 * ((2 * config.layers) ** -0.5 if last else 1.0)
        weights[name] = torch.randn(shape, generator=generator) * scale
    weights["model.embed_tokens.weight"] = _main_directions(target.embedding.detach().float().cpu(), config.hidden)
    network = Network(config, weights)
    # A tied head on embeddings this large would start with much too confident distributions.
    with torch.no_grad():
        network.norm.weight.fill_(config.hidden**-0.5 / _EMBEDDED)
    return network


def _main_directions(embedding: Tensor, size: int) -> Tensor:
    """[vocabulary, size]: the embeddings in the directions in which they differ most."""
    centred = embedding - embedding.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    kept = centred @ vectors.flip(1)[:, : min(size, embedding.shape[1])]
    if size > embedding.shape[1]:
        kept = nn.functional.pad(kept, (0, size - embedding.shape[1]))
    return kept * (_EMBEDDED / kept.square().mean().sqrt().clamp_min(1e-6))


class DraftModelsObjective:
    """Trains draft models side by side to write what the target would; the target does not change."""

    def __init__(self, target: Network, models: Mapping[str, Network]) -> None:
        self.target, self.models = target, nn.ModuleDict(models).to(target.embedding.device)

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.models.named_parameters())

    def distances(self, tokens: Tensor, selected: Tensor) -> dict[str, Distance]:
        last = self.target.config.layers
        with torch.no_grad():
            feature = self.target.norm(self.target(tokens, {last})[last])[selected]
        drafts = []
        for model in self.models.values():
            assert isinstance(model, Network)
            layers = model.config.layers
            drafts.append((model.norm(model(tokens, {layers})[layers])[selected], model.embedding))
        return dict(zip(self.models, distances(feature, self.target.head, drafts), strict=True))

    def loss(self, tokens: Tensor, selected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        by_name = self.distances(tokens, selected)
        figures = {name: distance.agreement for name, distance in by_name.items()}
        figures |= {f"1 - TV of {name}": distance.overlap for name, distance in by_name.items()}
        return torch.stack([distance.divergence for distance in by_name.values()]).sum(), figures


def train_draft_models(
    target: Network,
    texts: Texts,
    held_back: Texts,
    shapes: Mapping[str, DraftShape],
    settings: Settings,
    progress: Progress = silent,
    report: Report | None = None,
) -> tuple[dict[str, Network], TrainingRun, dict[str, dict[str, float]]]:
    """The models by name, how the run went, and each one's agreement and 1 - TV on texts that were held back."""
    models = {
        name: new_model(shape.config(target.config), target, settings.seed + number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    objective = DraftModelsObjective(target, models)
    compile_blocks(target, objective.models)
    run = fit(objective, texts, settings, progress, report)
    return models, run, measured(objective, held_back)


@torch.no_grad()
def measured(objective: DraftModelsObjective, texts: Texts) -> dict[str, dict[str, float]]:
    """Agreement, 1 - TV and divergence of each model before tokens of answers; before all tokens if there are none."""
    answers = texts.answers if texts.answers[:, 1:].any() else torch.ones_like(texts.answers)
    device = objective.target.embedding.device
    sums: dict[str, Tensor] = {}
    total = 0
    for start in range(0, len(texts), _BATCH):
        tokens = texts.tokens[start : start + _BATCH].to(device, torch.long)
        selected = torch.zeros_like(tokens, dtype=torch.bool)
        selected[:, :-1] = answers[start : start + _BATCH, 1:].to(device)
        count = int(selected.sum())
        if not count:
            continue
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"), as_written(device):
            by_name = objective.distances(tokens, selected)
        for name, distance in by_name.items():
            values = torch.stack((distance.agreement, distance.overlap, distance.divergence))
            sums[name] = sums.get(name, torch.zeros(3, device=device)) + count * values
        total += count
    names = ("agreement", "1 - TV", "divergence")
    return {
        name: dict(zip(names, [round(value, 4) for value in (added / total).tolist()], strict=True))
        for name, added in sums.items()
    }


def save_model(
    model: Network, tokenizer_folder: Path, folder: Path, card: str = "", dtype: torch.dtype = torch.bfloat16
) -> None:
    """An ordinary checkpoint: config.json, model.safetensors, and the tokenizer of the target's folder."""
    config = model.config
    stored_name = family_named(config.family).names
    state = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm.weight}
    for number, block in enumerate(model.blocks):
        # Compiled layers name their parameters like uncompiled ones.
        state |= {f"model.layers.{number}.{name}": tensor for name, tensor in block.state_dict().items()}
    expected = expected_tensors(config)
    tensors = {stored_name(name): state[name].detach().to("cpu", dtype).contiguous() for name in expected}
    described = {**to_huggingface(config), "torch_dtype": str(dtype).removeprefix("torch.")}
    with whole_folder(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for file in sorted(tokenizer_folder.iterdir()):
            wanted = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json")
            if wanted and file.name not in _NOT_COPIED:
                shutil.copyfile(file, temporary / file.name)
        if card:
            (temporary / "README.md").write_text(card, encoding="utf-8")


def model_card(name: str, target: str, texts: Texts, run: TrainingRun, figures: Mapping[str, float]) -> str:
    """What the model is and how it came about; for people."""
    rows, length = texts.tokens.shape
    return (
        f"# {name}\n\nDrafts for {target}; what that model writes does not change.\n\n"
        f"- Data: {rows:,} texts of {length} tokens.\n"
        f"- Recipe: distillation (the divergence of its distribution from the target's), {run.steps:,} steps, "
        f"{run.seconds:.0f} seconds.\n"
        f"- On texts that were held back: {json.dumps(dict(figures))}.\n"
    )


def parameters(model: Network) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(model.config).values())


def shapes_of(pairs: Sequence[tuple[int, int]]) -> dict[str, DraftShape]:
    """Shapes by a name that says how large each is."""
    return {f"draft-{layers}x{hidden}": DraftShape(layers, hidden) for layers, hidden in pairs}
