"""The calibration artifact of one model: expert orders, the SAVB gate, and where they come from."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .families import Parts
from .gate import Gate

SCHEMA = 1
TENSORS, META = "calibration.safetensors", "calibration.json"


def fingerprint(parts: Parts) -> str:
    """Identifies the model that a calibration is for: its family and the sizes that orders and gate depend on.

    Weights are not part of it: a fine-tuned model of the same shape passes, and should be calibrated anew.
    """
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "vocab_size",
    )
    sizes = {name: getattr(parts.config, name) for name in names}
    identity = json.dumps([parts.model.config.model_type, sizes], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def weights_digest(model: Any) -> str:
    """Tells trainings of one architecture apart: a few numbers of every weight, which is quick for 30 billion.

    Offloaded weights, which are not there, don't count.
    """
    digest = hashlib.sha256(str(model.dtype).encode())
    for weight in model.parameters():
        if not weight.is_meta:
            flat = weight.detach().flatten()
            digest.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass
class Calibration:
    """Orders and gate of one model.

    Attributes:
        model: `fingerprint` of the model it is for.
        orders: (L, E) int64, experts of each layer by falling routed mass of text tokens (paper, Sec. 2.2).
        mass: (L, E) float64, that mass by native expert, the mean of a token; None in artifacts that don't keep it.
        gate: the SAVB gate, or None if only orders were calibrated.
        theta: the gate's threshold. p: the share of routed mass that a prefix must cover.
        gate_text: "all" if the gate averages all text of the prompt, "after image" if only what follows the picture.
        provenance: what it was made from and how; "ids" are the questions of each part.
        others: what other methods were calibrated to, by their name.
    """

    model: str
    orders: Tensor
    gate: Gate | None = None
    theta: float = 0.5
    p: float = 0.7
    gate_text: str = "all"
    provenance: dict[str, Any] = field(default_factory=dict)
    others: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    mass: Tensor | None = None

    @property
    def ids(self) -> frozenset[str]:
        """The questions it was made from, which no evaluation may ask."""
        return frozenset(chain(*self.provenance.get("ids", {}).values()))

    def check(self, parts: Parts) -> None:
        """Refuse a model that this calibration was not made for.

        Raises:
            ValueError: the fingerprints differ.
        """
        if self.model != fingerprint(parts):
            raise ValueError(
                f"This calibration was made for another model (fingerprint {self.model}, this model's is "
                f"{fingerprint(parts)}). Calibrate this one with: decomoe calibrate --model MODEL --out FOLDER"
            )

    def of(self, method: str, parts: Parts) -> dict[str, Tensor]:
        """What another method was calibrated to on this model; empty if it was not.

        Raises:
            ValueError: the calibration is of another model.
        """
        self.check(parts)
        return self.others.get(method, {})

    def save(self, folder: str | Path) -> None:
        """Write the artifact into `folder`; an interrupted write leaves the old one."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"orders": self.orders.contiguous()}
        if self.mass is not None:
            tensors["mass"] = self.mass.contiguous()
        for method, values in self.others.items():
            tensors |= {f"{method}.{name}": value.contiguous() for name, value in values.items()}
        meta: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.model,
            "theta": self.theta,
            "p": self.p,
            "gate_text": self.gate_text,
            "gate": None,
            "provenance": self.provenance,
        }
        if self.gate is not None:
            tensors |= {f"gate.{name}": value.contiguous() for name, value in self.gate.state_dict().items()}
            meta["gate"] = self.gate.sizes
        save_file(tensors, folder / f"{TENSORS}.tmp")
        meta["tensors"] = _digest(folder / f"{TENSORS}.tmp")  # the two files belong together
        (folder / f"{META}.tmp").write_text(json.dumps(meta, indent=1) + "\n")
        for name in (TENSORS, META):
            os.replace(folder / f"{name}.tmp", folder / name)

    @classmethod
    def load(cls, folder: str | Path) -> "Calibration":
        """Read an artifact back.

        Raises:
            ValueError: there is none, or it is of another schema or damaged.
        """
        folder = Path(folder)
        try:
            meta = json.loads((folder / META).read_text())
            if meta["schema"] != SCHEMA or meta["tensors"] != _digest(folder / TENSORS):
                raise ValueError("of another schema, or not one piece")
            tensors = load_file(folder / TENSORS)
            orders, mass, gate = tensors.pop("orders"), tensors.pop("mass", None), None
            if not torch.equal(orders.sort(1).values, torch.arange(orders.shape[1]).expand_as(orders)):
                raise ValueError("an expert order is not a permutation")
            grouped: dict[str, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                method, _, rest = name.partition(".")
                grouped.setdefault(method, {})[rest] = value
            weights = grouped.pop("gate", {})
            if meta["gate"] is not None:
                gate = Gate(**meta["gate"])
                gate.load_state_dict(weights)
                gate.requires_grad_(False).eval()
            return cls(
                meta["model"],
                orders,
                gate,
                meta["theta"],
                meta["p"],
                meta["gate_text"],
                meta["provenance"],
                grouped,
                mass,
            )
        except FileNotFoundError:
            raise ValueError(f"There is no calibration in {folder}; 'decomoe calibrate' makes one.") from None
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"The calibration in {folder} can't be used ({error}); calibrate again.") from error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
