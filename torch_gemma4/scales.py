"""Small parameters, one copy for every row shard of the mesh.

The gradient of a scale that all devices share is a sum over the mesh. Taken where it arises, that
is a collective a layer for a few kilobytes, which all wait for. Instead each shard of the batch
reads its own copy and adds up its own gradient; the sum over copies comes after the layer loop, for
all layers at once. On one device there is one copy of one, and nothing changes.
"""

from torch import Tensor

from torch_gemma4.execution import Constrain


def copies(scale: Tensor, num_shards: int, constrain: Constrain) -> Tensor:
    """Stacked scales [..., D] -> [..., num_shards, D], copy i lying where shard i of the batch
    does."""
    repeated = scale.unsqueeze(-2).expand(*scale.shape[:-1], num_shards, scale.shape[-1])
    return constrain(repeated, "copies")


def spread(scale: Tensor, x: Tensor) -> Tensor:
    """A scale [D], or its copies [n, D], in a shape that multiplies x [B, ..., D] whose first dim
    n divides: [D] or [B, 1, ..., D]."""
    if scale.ndim == 1:
        return scale
    num_copies, dim = scale.shape
    share = scale[:, None].expand(num_copies, x.shape[0] // num_copies, dim)
    return share.reshape(x.shape[0], *[1] * (x.ndim - 2), dim)


def gather_copies(products: Tensor, scale: Tensor) -> Tensor:
    """The gradient of `scale` from the products [B, ..., D] that `spread` multiplied: summed over
    all rows, or over each copy's."""
    if scale.ndim == 1:
        return products.sum(tuple(range(products.ndim - 1)))
    by_copy = products.unflatten(0, (scale.shape[0], -1))
    return by_copy.sum(tuple(range(1, by_copy.ndim - 1)))
