"""Triton kernel of the augmentations: one program turns a uint8 image and 36 uniform numbers into a view.

It computes the same as `fmicl.data.augmentations.maker` and `fmicl.data.augmentations.operations`, but keeps the image
in registers from the crop to the normalisation.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _between(u, low, high):
    return low + (high - low) * u


@triton.jit
def _axis_weights(begin, length, mirror, full, size, FULL: tl.constexpr, SIZE: tl.constexpr):
    """(SIZE, FULL): weights of an axis's pixels in each pixel of the resized crop."""
    scale = length / size
    out = tl.arange(0, SIZE).to(tl.float32) + 0.5
    out = tl.where(mirror, size - out, out)
    pixel = tl.arange(0, FULL).to(tl.float32) + 0.5
    distance = tl.abs(pixel[None, :] - (begin + out * scale)[:, None])
    weights = tl.maximum(1 - distance / tl.maximum(scale, 1.0), 0.0)
    inside = (pixel > begin) & (pixel < begin + length) & (pixel < full)
    weights = tl.where(inside[None, :], weights, 0.0)
    total = tl.sum(weights, axis=1)
    return weights / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _tap(distance, scale, radius):
    return tl.where(tl.abs(distance) <= radius, tl.exp(scale * distance * distance), 0.0)


@triton.jit
def _blur_weights(sigma, radius, side, SIZE: tl.constexpr):
    """(SIZE, SIZE): a Gaussian around each pixel, cut off at the radius, with reflected borders."""
    scale = -0.5 / (sigma * sigma)
    at = tl.arange(0, SIZE).to(tl.float32)
    i, j = at[:, None], at[None, :]
    weights = _tap(i - j, scale, radius)
    weights += tl.where(j > 0, _tap(i + j, scale, radius), 0.0)
    weights += tl.where(j < side - 1, _tap(2 * (side - 1) - i - j, scale, radius), 0.0)
    weights = tl.where(j < side, weights, 0.0)
    total = tl.sum(weights, axis=1)
    return weights / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _resample(image, rows, columns):
    wide = tl.dot(rows, image, input_precision="ieee")
    return tl.dot(wide, tl.trans(columns), input_precision="ieee")


@triton.jit
def _luma(red, green, blue):
    return 0.2989 * red + 0.587 * green + 0.114 * blue


@triton.jit
def _rotate_hue(value, chroma, hue, n):
    k = hue + n
    k = k - 6 * tl.floor(k / 6)
    return value - chroma * tl.minimum(tl.maximum(tl.minimum(k, 4 - k), 0.0), 1.0)


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 255.0)


@triton.jit
def views(
    images, index, uniforms, result, height, width, size,
    scale_low, scale_high, log_low, log_high, centre_height, centre_width,
    flip_p, jitter_p, brightness, contrast, saturation, hue_range, grey_p, blur_p, sigma_low, sigma_high, radius,
    solarise_p, gain_0, gain_1, gain_2, offset_0, offset_1, offset_2,
    NUMBERS: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, JITTER: tl.constexpr, HUE: tl.constexpr,
    GREY: tl.constexpr, BLUR: tl.constexpr, SOLARISE: tl.constexpr, ATTEMPTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """View program_id(0), of images[index[program_id(0)]], written as (size, size, OUT) float32."""
    n = tl.program_id(0)
    u = uniforms + n * NUMBERS

    # The crop: the first attempt that fits, otherwise the centre.
    found = False
    h = centre_height.to(tl.float32)
    w = centre_width.to(tl.float32)
    for k in tl.static_range(ATTEMPTS):
        area = height * width * _between(tl.load(u + k), scale_low, scale_high)
        ratio = tl.exp(_between(tl.load(u + ATTEMPTS + k), log_low, log_high))
        wide = tl.floor(tl.sqrt(area * ratio) + 0.5)
        tall = tl.floor(tl.sqrt(area / ratio) + 0.5)
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        taken = fits & (found == False)  # noqa: E712
        w = tl.where(taken, wide, w)
        h = tl.where(taken, tall, h)
        found = found | fits
    top = tl.minimum(tl.floor(tl.load(u + 2 * ATTEMPTS) * (height - h + 1)), height - h)
    left = tl.minimum(tl.floor(tl.load(u + 2 * ATTEMPTS + 1) * (width - w + 1)), width - w)
    top = tl.where(found, top, tl.floor((height - h) / 2))
    left = tl.where(found, left, tl.floor((width - w) / 2))
    mirror = tl.load(u + 2 * ATTEMPTS + 2) < flip_p
    rows = _axis_weights(top, h, False, height, size, HEIGHT, SIZE)
    columns = _axis_weights(left, w, mirror, width, size, WIDTH, SIZE)

    y, x = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    there = (y < height)[:, None] & (x < width)[None, :]
    plane = height * width
    source = images + tl.load(index + n) * (CHANNELS * plane) + y[:, None] * width + x[None, :]
    red = _resample(tl.load(source, mask=there, other=0).to(tl.float32), rows, columns)
    green, blue = red, red
    if CHANNELS == 3:
        green = _resample(tl.load(source + plane, mask=there, other=0).to(tl.float32), rows, columns)
        blue = _resample(tl.load(source + 2 * plane, mask=there, other=0).to(tl.float32), rows, columns)

    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    valid = (i < size) & (j < size)
    c = u + 2 * ATTEMPTS + 3
    if JITTER:
        changed = tl.load(c) < jitter_p
        # Factors of brightness, contrast and saturation, and the hue shift.
        by = tl.where(changed, _between(tl.load(c + 1), tl.maximum(0.0, 1 - brightness), 1 + brightness), 1.0)
        flat = tl.where(changed, _between(tl.load(c + 2), tl.maximum(0.0, 1 - contrast), 1 + contrast), 1.0)
        pale = tl.where(changed, _between(tl.load(c + 3), tl.maximum(0.0, 1 - saturation), 1 + saturation), 1.0)
        turn = tl.where(changed, _between(tl.load(c + 4), -hue_range, hue_range), 0.0)
        a0, a1, a2, a3 = tl.load(c + 5), tl.load(c + 6), tl.load(c + 7), tl.load(c + 8)
        place_0 = (a1 < a0).to(tl.int32) + (a2 < a0).to(tl.int32) + (a3 < a0).to(tl.int32)
        place_1 = (a0 <= a1).to(tl.int32) + (a2 < a1).to(tl.int32) + (a3 < a1).to(tl.int32)
        place_2 = (a0 <= a2).to(tl.int32) + (a1 <= a2).to(tl.int32) + (a3 < a2).to(tl.int32)
        place_3 = (a0 <= a3).to(tl.int32) + (a1 <= a3).to(tl.int32) + (a2 <= a3).to(tl.int32)
        for k in tl.static_range(4):
            if place_3 == k:
                if HUE:
                    value = tl.maximum(tl.maximum(red, green), blue)
                    chroma = value - tl.minimum(tl.minimum(red, green), blue)
                    divisor = tl.where(chroma == 0, 1.0, chroma)
                    hue = tl.where(
                        value == red,
                        (green - blue) / divisor,
                        tl.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
                    )
                    hue += 6 * turn
                    red = _rotate_hue(value, chroma, hue, 5)
                    green = _rotate_hue(value, chroma, hue, 3)
                    blue = _rotate_hue(value, chroma, hue, 1)
            else:
                ratio = tl.where(place_0 == k, by, tl.where(place_1 == k, flat, tl.where(place_2 == k, pale, 1.0)))
                to_mean = tl.where(place_1 == k, 1 - flat, 0.0)
                to_grey = tl.where(place_2 == k, 1 - pale, 0.0)
                if CHANNELS == 3:
                    grey = tl.floor(_luma(red, green, blue))
                else:
                    grey = red
                mean = tl.sum(tl.where(valid, grey, 0.0)) / (size * size)
                other = mean * to_mean + grey * to_grey
                red = _clamp(red * ratio + other)
                green = _clamp(green * ratio + other)
                blue = _clamp(blue * ratio + other)
    if GREY:
        if tl.load(c + 9) < grey_p:
            luma = _luma(red, green, blue)
            red, green, blue = luma, luma, luma
    if BLUR:
        if tl.load(c + 10) < blur_p:
            kernel = _blur_weights(_between(tl.load(c + 11), sigma_low, sigma_high), radius, size, SIZE)
            red = _resample(red, kernel, kernel)
            green = _resample(green, kernel, kernel)
            blue = _resample(blue, kernel, kernel)
    if SOLARISE:
        if tl.load(c + 12) < solarise_p:
            red, green, blue = tl.minimum(red, 255 - red), tl.minimum(green, 255 - green), tl.minimum(blue, 255 - blue)
    goal = result + n.to(tl.int64) * (size * size * OUT) + (i * size + j) * OUT
    tl.store(goal, red * gain_0 + offset_0, mask=valid)
    if OUT == 3:
        tl.store(goal + 1, green * gain_1 + offset_1, mask=valid)
        tl.store(goal + 2, blue * gain_2 + offset_2, mask=valid)
