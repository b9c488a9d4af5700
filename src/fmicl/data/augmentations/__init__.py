"""Data augmentation of images: random views of whole batches, on whatever device they are.

Each sample has its own random parameters. Nothing here loops over samples, synchronises with the device or branches on
data, so it runs at a GPU's speed and compiles as one graph. With the parameters fixed, each operation gives what
``torchvision.transforms.v2.functional`` gives, to within one grey level.
"""
