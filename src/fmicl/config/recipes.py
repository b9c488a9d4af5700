"""The recipes: values of options under a name, like the paper's table of settings.

What a recipe doesn't mention has the default that the option is declared with.
"""

from __future__ import annotations

from typing import Any

from fmicl.config.settings import register_recipe
from fmicl.data.augmentations.views import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    STL10_MEAN,
    STL10_STD,
)

# fmt: off
register_recipe(
    "digits",
    summary="Small conv net on scikit-learn's digits (embedded): about a minute on two CPU cores.",
    dataset="digits", encoder="small_conv", hidden=256, dim=64,
    # alpha and views: the best of 38 settings in k-NN and linear probe, as a mean over 6 seeds, on a quarter of the
    # training images that was held out (--validation 0.25).
    batch_size=256, learning_rate=0.2, alpha=20.0, epochs=100, warmup_epochs=5.0, weight_decay=5e-4,
    size=8, crop_scale=(0.4, 1.0), flip=0.0, jitter=0.8, grey=0.0, mean=(0.305,), std=(0.376,),
    k=20, monitor_every=20, baselines=True,
)
register_recipe(
    "cifar10",
    summary="ResNet-18 with the CIFAR stem on CIFAR-10, SimCLR: the paper's setting.",
    dataset="cifar10", encoder="resnet18", stem="small", dim=512,
    batch_size=512, learning_rate=0.1, alpha=40.0, epochs=800, weight_decay=5e-4, k=200,
    size=32, mean=CIFAR10_MEAN, std=CIFAR10_STD,
    symmetric=True, queue=32768,  # of MoCo, see docs/systems.md; --no-symmetric --queue 4096 is the paper's form
)
register_recipe(
    "stl10",
    summary="ResNet-50 on STL-10 with its unlabelled images, SimCLR: the paper's setting.",
    dataset="stl10", encoder="resnet50", stem="standard", dim=512,
    batch_size=64, learning_rate=0.1, alpha=40.0, epochs=800, k=200,
    size=96, mean=STL10_MEAN, std=STL10_STD,
)
register_recipe(
    "tinyimagenet",
    summary="ResNet-50 on TinyImageNet (200 classes, 64 pixels), SimCLR: the paper's setting.",
    dataset="tinyimagenet", encoder="resnet50", stem="standard", dim=512,
    batch_size=256, learning_rate=0.1, alpha=40.0, epochs=800, k=200,
    size=64, mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821),
)
# MoCo v3's views, head, weight decay and warm-up, which the paper follows and does not repeat; two families of views.
_MOCOV3: dict[str, Any] = {
    "dataset": "imagenet", "encoder": "vit_small_patch16_224", "method": "mocov3", "hidden": 4096, "dim": 512,
    "batch_size": 1024, "optimizer": "adamw", "weight_decay": 0.1, "warmup_epochs": 40.0, "alpha": 40.0, "epochs": 1000,
    "k": 20, "monitor_every": 0,  # the paper has no k-NN here; 20 neighbours are usual, and only at the end
    "size": 224, "crop_scale": (0.08, 1.0), "saturation": 0.2, "blur": 1.0, "mean": IMAGENET_MEAN, "std": IMAGENET_STD,
    "second_blur": 0.1, "second_solarise": 0.2,
}
register_recipe(
    "imagenet",
    summary="ViT-S/16 with 6 blocks on ImageNet, MoCo v3, AdamW at a learning rate of 0.1: the paper's setting.",
    **_MOCOV3, depth=6, learning_rate=0.1, schedule="linear",  # as printed; no run of ours has tried this rate
)
register_recipe(
    "imagenet_mocov3",
    summary="ViT-S/16 (12 blocks) on ImageNet with MoCo v3's own schedule, AdamW at 6e-4: take this one to train.",
    # MoCo v3's authors take 1.5e-4 x batch / 256, of which the paper's rate is 167 times, and the 12 blocks of ViT-S.
    **_MOCOV3, learning_rate=1.5e-4, scale_learning_rate=True,
)
register_recipe(
    "images",
    summary="Your own folder of images, with or without class subfolders: settings by their number, size and device.",
    dataset="images", encoder="auto", stem="standard", size="auto", mean="auto", std="auto",
    batch_size="auto", epochs="auto", learning_rate="auto", optimizer="adamw", weight_decay=0.05, shift="optimal",
    hidden=512, dim=128, blur=0.0, k=20, baselines=True,
)
register_recipe(
    "wikipedia",
    summary="BERT-base on a file of sentences, two views by dropout (SimCSE): the paper's setting.",
    task="text",
)
# fmt: on
