"""Splits decoder layers over ranks, found by the names that transformers uses.

Megatron's split (Shoeybi et al., 2019): a rank has some heads of attention and some features of an
MLP. Queries, keys and values are split by KV heads, gate and up by features: their outputs. Output
and down projections are split by the same inputs, and the sums of all ranks are added: two sums
for each layer. Everything else is the same on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model.split.weight_part import Part, Ranges, share
from gpu_worker.ranks.member import Member
from shared.errors import ModelUnsupported

_QKV = ("q_proj", "k_proj", "v_proj")
_OUTPUTS = ("o_proj", "out_proj")
# Projections of an MLP that are split by outputs, with the one that is split by inputs.
_PLAIN_MLPS = (
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)


@dataclass(slots=True)
class LayerSplit:
    """The split of a model's layers.

    Attributes:
        parts: of weights and biases, by name.
        summed: modules whose outputs are partial sums, with their parents and names there.
        uneven: heads and KV heads of which ranks have different numbers; None: there are none.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    summed: list[tuple[nn.Module, str]] = field(default_factory=list)
    uneven: tuple[int, int] | None = None


class _LocalConfig:
    """A configuration with the numbers of heads of one rank."""

    def __init__(self, config: Any, **own: int) -> None:
        self._config = config
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._config, name)


def split_layers(model: nn.Module, member: Member) -> LayerSplit:
    """Find the weights of a whole model that are split, and change what modules derive from them.

    The weights themselves are left as they are.

    Raises:
        ModelUnsupported: a layer cannot be split.
    """
    splitter = _Splitter(model, member)
    for name, module in list(model.named_modules()):
        splitter.attention(name, module)
        splitter.mlp(name, module)
    splitter.refuse_the_rest()
    return splitter.found


class _Splitter:
    def __init__(self, model: nn.Module, member: Member) -> None:
        self.found = LayerSplit()
        self._model = model
        self._member = member
        self._attention: list[tuple[str, int]] = []  # names and sizes of heads

    # ---------------------------------------------------------------- attention

    def attention(self, name: str, module: nn.Module) -> None:
        """Split a module of attention by heads; others are left alone."""
        head_dim = getattr(module, "head_dim", getattr(module, "head_size", None))
        output = next((each for each in _OUTPUTS if hasattr(module, each)), "")
        if not isinstance(head_dim, int):
            return
        if output and all(hasattr(module, each) for each in _QKV):
            self._separate(name, module, head_dim, output)
        elif output and hasattr(module, "qkv_proj"):
            self._joined(name, module, head_dim, "qkv_proj", output)
        elif hasattr(module, "c_attn") and hasattr(module, "c_proj"):
            self._joined(name, module, head_dim, "c_attn", "c_proj")
        elif hasattr(module, "query_key_value") and hasattr(module, "dense"):
            self._by_head(name, module, head_dim)

    def _separate(self, name: str, module: Any, head_dim: int, output: str) -> None:
        num_heads = _out_features(module.q_proj) // head_dim
        num_kv_heads = _out_features(module.k_proj) // head_dim
        heads, kv_heads = self._heads(name, num_heads, num_kv_heads)
        self._outputs(f"{name}.q_proj", module.q_proj, heads.times(head_dim))
        for each in ("k_proj", "v_proj"):
            self._outputs(f"{name}.{each}", getattr(module, each), kv_heads.times(head_dim))
        self._finish(name, module, head_dim, output, heads, kv_heads)

    def _joined(self, name: str, module: Any, head_dim: int, joined: str, output: str) -> None:
        """Queries, keys and values are parts of one layer, in this order."""
        projection = getattr(module, joined)
        num_heads = _in_features(getattr(module, output)) // head_dim
        num_kv_heads = (_out_features(projection) // head_dim - num_heads) // 2
        heads, kv_heads = self._heads(name, num_heads, num_kv_heads)
        queries, keys = heads.times(head_dim), kv_heads.times(head_dim)
        at = num_heads * head_dim
        behind = at + num_kv_heads * head_dim
        ranges = queries.then(keys.moved(at)).then(keys.moved(behind))
        self._outputs(f"{name}.{joined}", projection, ranges)
        self._finish(name, module, head_dim, output, heads, kv_heads)

    def _by_head(self, name: str, module: Any, head_dim: int) -> None:
        """Query, key and value of each head follow each other."""
        num_heads = _out_features(module.query_key_value) // (3 * head_dim)
        heads, kv_heads = self._heads(name, num_heads, num_heads)
        qkv = heads.times(3 * head_dim)
        self._outputs(f"{name}.query_key_value", module.query_key_value, qkv)
        self._finish(name, module, head_dim, "dense", heads, kv_heads)

    def _heads(self, name: str, num_heads: int, num_kv_heads: int) -> tuple[Ranges, Ranges]:
        """This rank's heads and KV heads; a KV head is on several ranks if there are fewer."""
        ranks, rank = self._member.num_ranks, self._member.rank
        if num_kv_heads >= ranks:
            kv_heads = share(num_kv_heads, rank, ranks)
            if num_kv_heads % ranks:
                self.found.uneven = num_heads, num_kv_heads
            return kv_heads.times(num_heads // num_kv_heads), kv_heads
        if num_heads % ranks or ranks % num_kv_heads:
            raise ModelUnsupported(
                f"{name} has {num_heads} heads and {num_kv_heads} KV heads, which "
                f"{ranks} workers cannot share: choose another --tensor-parallel-size"
            )
        first = rank * num_kv_heads // ranks
        return share(num_heads, rank, ranks), Ranges(((first, first + 1),))

    def _finish(
        self, name: str, module: Any, head_dim: int, output: str, heads: Ranges, kv_heads: Ranges
    ) -> None:
        projection = getattr(module, output)
        self._inputs(f"{name}.{output}", projection, heads.times(head_dim))
        self.found.summed.append((module, output))
        num_heads, num_kv_heads = heads.size, kv_heads.size
        own = {
            "num_heads": num_heads,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "num_key_value_groups": num_heads // num_kv_heads,
            "split_size": num_heads * head_dim,
        }
        for key, value in own.items():
            if isinstance(getattr(module, key, None), int):
                setattr(module, key, value)
        if hasattr(module, "config"):
            module.config = _LocalConfig(
                module.config, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads
            )
        self._attention.append((name, head_dim))

    # ---------------------------------------------------------------------- MLP

    def mlp(self, name: str, module: Any) -> None:
        """Split a module that is an MLP, or has the two layers of one, by features."""
        children = {child for child, each in module.named_children() if list(each.parameters())}
        if children == {"gate_proj", "up_proj", "down_proj"}:
            features = self._features(name, _out_features(module.gate_proj))
            self._outputs(f"{name}.gate_proj", module.gate_proj, features)
            self._outputs(f"{name}.up_proj", module.up_proj, features)
            self._gated(name, module, features)
        elif children == {"gate_up_proj", "down_proj"}:
            size = _out_features(module.gate_up_proj) // 2
            features = self._features(name, size)
            both = features.then(features.moved(size))
            self._outputs(f"{name}.gate_up_proj", module.gate_up_proj, both)
            self._gated(name, module, features)
        for first, last in _PLAIN_MLPS:
            if first in children and last in children:
                features = self._features(name, _out_features(getattr(module, first)))
                self._outputs(f"{name}.{first}", getattr(module, first), features)
                self._inputs(f"{name}.{last}", getattr(module, last), features)
                self.found.summed.append((module, last))

    def _gated(self, name: str, module: Any, features: Ranges) -> None:
        """The sum is that of the whole MLP, so that its layers can be fused."""
        self._inputs(f"{name}.down_proj", module.down_proj, features)
        owner, _, child = name.rpartition(".")
        self.found.summed.append((self._model.get_submodule(owner), child))

    def _features(self, name: str, size: int) -> Ranges:
        ranks = self._member.num_ranks
        if size % ranks:
            raise ModelUnsupported(
                f"{name} has {size} features, which {ranks} workers cannot divide evenly: choose "
                "another --tensor-parallel-size"
            )
        return share(size, self._member.rank, ranks)

    # ------------------------------------------------------------------- layers

    def _outputs(self, name: str, layer: Any, ranges: Ranges) -> None:
        self._take(name, layer, 0, ranges)
        if layer.bias is not None:
            self.found.parts[f"{name}.bias"] = Part(0, ranges)

    def _inputs(self, name: str, layer: Any, ranges: Ranges) -> None:
        self._take(name, layer, 1, ranges)
        if layer.bias is not None and self._member.rank:  # the sum has it once
            size = layer.bias.shape[0]
            self.found.parts[f"{name}.bias"] = Part(0, Ranges(((0, size),)), is_zero=True)

    def _take(self, name: str, layer: Any, dim: int, ranges: Ranges) -> None:
        if type(layer) is nn.Linear:
            setattr(layer, ("out_features", "in_features")[dim], ranges.size)
        elif type(layer) is Conv1D:  # its weight is transposed
            setattr(layer, ("nf", "nx")[dim], ranges.size)
            dim = 1 - dim
        else:
            kind = type(layer).__name__
            raise ModelUnsupported(f"{name} is a {kind}, which cannot be split over workers")
        self.found.parts[f"{name}.weight"] = Part(dim, ranges)

    def refuse_the_rest(self) -> None:
        """Refuse layers that have weights which would have to be split, and are not.

        Raises:
            ModelUnsupported: names the first one.
        """
        if not self._attention:
            raise ModelUnsupported("it has no attention that can be split over workers by name")
        layers = _layer_lists(self._model, [name for name, _ in self._attention])
        for name, weight in self._model.named_parameters():
            if name in self.found.parts or not name.startswith(layers):
                continue
            head_dims = [dim for each, dim in self._attention if name.startswith(f"{each}.")]
            is_bias = name.endswith(".bias") and f"{name[:-5]}.weight" in self.found.parts
            per_head = not head_dims or weight.shape[0] in head_dims
            if not is_bias and (weight.dim() > 1 or not per_head):
                raise ModelUnsupported(
                    f"{name} cannot be split over workers: no rule for a layer of this name"
                )


def _layer_lists(model: nn.Module, attention: Sequence[str]) -> tuple[str, ...]:
    """Beginnings of the names of everything in lists of layers with attention."""
    lists = {
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and any(each.startswith(f"{name}.") for each in attention)
    }
    return tuple(lists)


def _out_features(layer: Any) -> int:
    size: int = layer.nf if isinstance(layer, Conv1D) else layer.out_features
    return size


def _in_features(layer: Any) -> int:
    size: int = layer.nx if isinstance(layer, Conv1D) else layer.in_features
    return size
