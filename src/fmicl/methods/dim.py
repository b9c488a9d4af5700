"""Deep InfoMax: information between local features of a view and global features of another (Hjelm et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fmicl.methods.base import Comparison, Method
from fmicl.methods.critics import CriticLoss, CriticOptions
from fmicl.methods.registry import register_method
from fmicl.models.vision import mlp
from fmicl.utils.options import option


class DIM(Method):
    """Local features of one view are paired with the global feature vector of the other, and the global vectors too.

    After Hjelm et al., "Learning deep representations by mutual information estimation and maximization", 2019, with
    encode-and-dot critics (:class:`fmicl.methods.critics.CriticLoss`): phi(local) and psi(global) at each place of the
    encoder's last feature map, and psi(global) and psi(global'). Pairs are of two views, as in Bachman, Hjelm and
    Buchwalter, "Learning Representations by Maximizing Mutual Information Across Views", 2019: a vector that is pooled
    from a map contains that map. The paper's third term, an adversarial prior on the features, is left out.

    Args:
        encoder: as in :class:`Method`, and so are the other arguments; it has ``forward_features`` and
            ``forward_head``, as timm's models have.
        objective: a :class:`CriticLoss`; None for InfoNCE.
        local_width: channels of the encoder's feature map.
        local_weight: weight of the local critic.
        global_weight: weight of the global critic.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = DIM(SmallConv(), dim=8, hidden=16, local_width=128)
        >>> method.loss(torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)).first.shape
        torch.Size([4, 8])
    """

    local_crops = True

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module | None = None,
        *,
        dim: int = 512,
        hidden: int = 2048,
        local_width: int,
        local_weight: float = 1.0,
        global_weight: float = 0.5,
        **options: Any,
    ) -> None:
        objective = CriticLoss(None) if objective is None else objective
        super().__init__(encoder, objective, dim=dim, hidden=hidden, **options)
        self.local_weight, self.global_weight = local_weight, global_weight
        self.local_head = mlp((local_width, hidden, dim))

    def compare_views(self, first: Tensor, second: Tensor, local: Tensor | None = None) -> Comparison:
        """The weighted losses of the local and the global critic; a local crop is a pair with both views' maps."""
        n = len(first)
        maps: Tensor = self.encoder.forward_features(torch.cat([first, second]))  # type: ignore[operator]
        one, other = self.projection(self.encoder.forward_head(maps)).unsqueeze(1).split(n)  # type: ignore[operator]
        places = maps.flatten(2).transpose(1, 2) if maps.ndim == 4 else maps  # (2N, P, channels)
        embedded: Tensor = self.local_head(places.flatten(0, 1))
        local_one, local_other = embedded.unflatten(0, places.shape[:2]).split(n)
        pairs = [(local_one, other), (local_other, one)]
        for crop in self.embed_local(local, n):
            pairs += [(local_one, crop.unsqueeze(1)), (local_other, crop.unsqueeze(1))]
        near = torch.stack([self.objective(x, y) for x, y in pairs]).mean()
        far = self.objective(one, other)
        loss = self.local_weight * near + self.global_weight * far
        return Comparison(loss, one.squeeze(1).detach(), other.squeeze(1).detach())


@register_method("dim", summary="Deep InfoMax: local features of a view against global ones of another.")
@dataclass(frozen=True)
class DIMOptions(CriticOptions):
    """Options of Deep InfoMax."""

    method: ClassVar[type[Method]] = DIM
    feature_maps: ClassVar[bool] = True

    local_weight: float = option(1.0, "Weight of the critic of local and global features.", at_least=0)
    global_weight: float = option(0.5, "Weight of the critic of two global features.", at_least=0)

    def __post_init__(self) -> None:
        """Refuse two weights of zero."""
        super().__post_init__()
        if not self.local_weight + self.global_weight:
            raise ValueError("local_weight and global_weight are both 0, so there is nothing to train")
