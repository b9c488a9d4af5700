"""The loss of learned critics, CPC and Deep InfoMax, against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmicl
from fmicl.config import recipe
from fmicl.methods import CPC, DIM
from fmicl.methods.cpc import patches, token_runs
from fmicl.methods.critics import CriticLoss
from fmicl.models.vision import SmallConv, build_encoder, feature_map_width
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method
from fmicl.training.tasks.text import TextTask


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(n: int = 5, side: int = 8) -> tuple[Tensor, Tensor]:
    return vectors(n, 1, side, side), vectors(n, 1, side, side, seed=1)


def plain_loss(name: str | None, x: Tensor, y: Tensor, present: Tensor) -> float:
    """Over positions and samples, entry by entry."""
    rewards, costs = [], []
    for p in range(x.shape[1]):
        for i in range(len(x)):
            if not present[i, p]:
                continue
            critic = [float(x[i, p] @ y[j, p % y.shape[1]]) / x.shape[2] ** 0.5 for j in range(len(y))]
            others = [j for j in range(len(y)) if j != i and present[j, p]]
            if name is None:
                rewards.append(critic[i] - math.log(sum(math.exp(critic[j]) for j in [i, *others])))
                continue
            f = fmicl.divergence(name)
            rewards.append(float(f.score(torch.tensor(critic[i]))))
            costs += [float(f.penalty(torch.tensor(critic[j]))) for j in others]
    return float((sum(costs) / len(costs) if costs else 0.0) - sum(rewards) / len(rewards))


@pytest.mark.parametrize("name", [None, "js", "kl", "pearson"])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("missing", [True, False])
def test_loss_of_a_critic(name: str | None, wide: bool, missing: bool) -> None:
    x, y = vectors(4, 3, 2), vectors(4, 3 if wide else 1, 2, seed=1)
    present = torch.ones(4, 3, dtype=torch.bool)
    if missing:
        present[0, 1] = present[3, 0] = False
    loss = CriticLoss(None if name is None else fmicl.divergence(name))
    assert float(loss(x, y, present)) == pytest.approx(plain_loss(name, x, y, present), rel=1e-4)
    if not missing:
        torch.testing.assert_close(loss(x, y), loss(x, y, present))


def test_js_is_deep_infomaxs_loss_up_to_a_constant() -> None:
    x, y = vectors(6, 2, 3), vectors(6, 2, 3, seed=1)
    critic = torch.einsum("npd,mpd->pnm", x, y) / 3**0.5
    own = torch.eye(6, dtype=torch.bool).expand(2, 6, 6)
    theirs = nn.functional.softplus(-critic[own]).mean() + nn.functional.softplus(critic[~own]).mean()
    torch.testing.assert_close(CriticLoss(fmicl.divergence("js"))(x, y), theirs - 2 * math.log(2))


def test_a_certain_positive_pair_does_not_overflow() -> None:
    x = torch.tensor([[[200.0, 0.0]], [[0.0, 200.0]]], requires_grad=True)
    loss = CriticLoss(fmicl.divergence("kl"))(x, x.detach())
    loss.backward()
    assert bool(loss.isfinite())
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_patches_are_crops_that_overlap_by_half() -> None:
    whole = torch.arange(2 * 64.0).view(2, 1, 8, 8)
    cut = patches(whole, 3)
    assert cut.shape == (2, 3, 3, 1, 4, 4)
    for column in range(3):
        for row in range(3):
            expected = whole[:, :, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4]
            assert torch.equal(cut[:, column, row], expected)
    with pytest.raises(ValueError, match=r"8 pixels.*9"):
        patches(whole, 9)


def cpc(**options: Any) -> CPC:
    torch.manual_seed(0)
    return CPC(SmallConv(1, 4), dim=8, hidden=16, **options)


def test_cpc_is_the_mean_over_steps_places_and_views() -> None:
    method = cpc(parts=3, steps=2).eval()
    total, terms = 0.0, 0
    for view in images():
        z = torch.stack(
            [method.embed(view[:, :, 2 * r : 2 * r + 4, 2 * c : 2 * c + 4]) for c in range(3) for r in range(3)]
        )
        z = z.unflatten(0, (3, 3))
        for step, predict in enumerate(method.predictors, 1):
            places = []
            for column in range(3):
                state = torch.zeros(5, 8)
                for row in range(3 - step):
                    state = method.context(z[column, row], state)
                    scores = predict(state) @ z[column, row + step].T / 8**0.5
                    places.append(nn.functional.cross_entropy(scores, torch.arange(5)))
            total, terms = total + float(torch.stack(places).mean().detach()), terms + 1
    assert float(method.loss(*images()).loss.detach()) == pytest.approx(total / terms, rel=1e-5)


def test_contexts_do_not_see_what_they_predict() -> None:
    method = cpc().eval()
    z = vectors(2, 3, 3, 8)
    later = z.clone()
    later[:, :, 2] = 0
    torch.testing.assert_close(method._contexts(z), method._contexts(later))
    later[:, :, 0] = 0
    assert not torch.allclose(method._contexts(z), method._contexts(later))


def test_runs_of_tokens_that_are_padding_are_left_out() -> None:
    class Bag(nn.Module):
        num_features = 4

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def forward(self, ids: Tensor) -> Tensor:
            assert bool((ids >= 0).any(dim=1).all())  # a mean over no tokens is not a number
            mask = (ids >= 0).unsqueeze(2)
            vectors: Tensor = (self.table(ids.clamp_min(0)) * mask).sum(1) / mask.sum(1)
            return vectors

    torch.manual_seed(0)
    method = CPC(Bag(), dim=4, projection=nn.Identity(), parts=3, steps=2)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, -1, -1], [11, 12, 13, 14, 15, -1], [3, 9, -1, -1, -1, -1]])
    loss = method.loss(ids, ids).loss
    assert token_runs(ids, 3).shape == (4, 1, 3, 2)
    z = torch.stack([method.encoder(ids[:3, k : k + 2]) for k in (0, 2)], dim=1)
    third = method.encoder(ids[[0, 2], 4:])
    c1 = method.context(z[:, 0], torch.zeros(3, 4))
    c2 = method.context(z[:, 1], c1)
    one, two = method.predictors
    entropy = nn.functional.cross_entropy
    near = entropy(one(c1) @ z[:, 1].T / 2, torch.arange(3)) * 3
    near = (near + entropy(one(c2)[[0, 2]] @ third.T / 2, torch.arange(2)) * 2) / 5
    expected = (near + entropy(two(c1)[[0, 2]] @ third.T / 2, torch.arange(2))) / 2
    torch.testing.assert_close(loss, expected)


def dim(**options: Any) -> DIM:
    torch.manual_seed(0)
    return DIM(SmallConv(1, 4), dim=8, hidden=16, local_width=16, **options)


@pytest.mark.parametrize("name", [None, "js", "kl"])
def test_dim_pairs_each_place_with_the_other_views_vector(name: str | None) -> None:
    loss = CriticLoss(None if name is None else fmicl.divergence(name))
    method = dim(objective=loss, local_weight=0.7, global_weight=0.2).eval()
    first, second = images()
    everyone = torch.ones(5, 16, dtype=torch.bool)
    maps, vector = {}, {}
    for key, view in (("a", first), ("b", second)):
        map_ = method.encoder.forward_features(view)  # type: ignore[operator]
        maps[key] = torch.stack([method.local_head(map_[:, :, i, j]) for i in range(4) for j in range(4)], dim=1)
        vector[key] = method.embed(view).unsqueeze(1)
    near = [plain_loss(name, maps[a], vector[b].expand(-1, 16, -1), everyone) for a, b in ("ab", "ba")]
    far = plain_loss(name, vector["a"], vector["b"], everyone)
    found = method.loss(first, second)
    assert float(found.loss) == pytest.approx(0.7 * sum(near) / 2 + 0.2 * far, rel=1e-4)
    found.loss.backward()
    assert all(p.grad is not None for p in method.parameters())


@pytest.mark.parametrize(("encoder", "width"), [("resnet18", 512), ("vit_tiny_patch16_224", 192)])
def test_dim_takes_maps_of_networks_and_tokens_of_transformers(encoder: str, width: int) -> None:
    network = build_encoder(encoder, size=32, depth=1 if "vit" in encoder else None)
    assert feature_map_width(network, 32, 3) == width
    method = DIM(network, dim=8, hidden=16, local_width=width)
    method.loss(vectors(2, 3, 32, 32), vectors(2, 3, 32, 32, seed=1)).loss.backward()


@pytest.mark.parametrize("method", ["cpc", "dim"])
def test_objectives_are_bounds_for_any_critic(method: str) -> None:
    for changes, name in (({"divergence": "tsallis", "order": 2.5}, "tsallis"), ({"objective": "infonce"}, None)):
        settings = recipe("digits", method=method, hidden=16, dim=8, **changes)
        built = build_image_method(settings, build_image_encoder(settings))
        assert isinstance(built.objective, CriticLoss)
        assert (built.objective.divergence is None) == (name is None)
        assert settings.unused() == {}
    assert built.objective.divergence is None
    assert set(recipe("digits", method=method, alpha=3.0, gamma=2.0).unused()) == {"alpha", "gamma"}
    with pytest.raises(ValueError, match=f"{method.upper()}.*fmicl.*infonce"):
        _ = recipe("digits", method=method, objective="spectral").objective_options


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prediction_steps.*3.*3"):
        recipe("digits", method="cpc", prediction_steps=3)
    with pytest.raises(ValueError, match="both 0"):
        recipe("digits", method="dim", local_weight=0.0, global_weight=0.0)
    with pytest.raises(ValueError, match="patches"):
        build_image_encoder(recipe("cifar10", method="cpc", encoder="vit_tiny_patch16_224", stem="auto"))
    with pytest.raises(ValueError, match="steps"):
        cpc(parts=2, steps=2)
    with pytest.raises(ValueError, match="dim needs feature maps"):
        TextTask.check(recipe("wikipedia", method="dim"))
