"""The tables of [Iandola16] that `design_space.py` sets beside bnfuse's figures. `x`: the change against table 4.2."""

from __future__ import annotations

# layer: output, parameters, computation
TABLE_4_2 = """
data    633MB   0        0
conv1   1190MB  0.140MB  216GF
conv2   1190MB  0.0372MB 57.1GF
conv3   1190MB  0.0372MB 57.1GF
pool3   287MB   0        0.644GF
conv4   764MB   2.46MB   917GF
conv5   764MB   263kB    97.8GF
conv6   764MB   263kB    97.8GF
pool6   177MB   0        0.399GF
conv7   266MB   3.54MB   306GF
conv8   266MB   0.591MB  51.0GF
conv9   266MB   0.591MB  51.0GF
pool9   56.6MB  0        0.127GF
conv10  151MB   14.2MB   261GF
conv11  151MB   4.20MB   77.3GF
conv12  151MB   4.10MB   75.5GF
pool12  4.0MB   0        0.073GF
total   5.90GB  30.4MB   2.27TF
"""

# output maps, height and width alike
SIZES_4_2 = "227 55 55 55 27 27 27 27 13 13 13 13 6 6 6 6 1"

# table: what is changed, settings of the zoo's nin, output maps, changes of layers and total, absolute totals
VARIANTS: dict[str, tuple[str, dict[str, object], str, str]] = {
    "4.3": (
        "4x more input channels",
        {"channels": 12},
        SIZES_4_2,
        """
        data 4x 0 0; conv1 1x 4x 4x; conv2 1x 1x 1x; conv3 1x 1x 1x; pool3 1x 1x 1x; conv4 1x 1x 1x; conv5 1x 1x 1x
        conv6 1x 1x 1x; pool6 1x 1x 1x; conv7 1x 1x 1x; conv8 1x 1x 1x; conv9 1x 1x 1x; pool9 1x 1x 1x
        conv10 1x 1x 1x; conv11 1x 1x 1x; conv12 1x 1x 1x; pool12 1x 1x 1x
        total 1x 1x 1.3x; amount 5.90TB 30.4MB 2.92TF
        """,
    ),
    "4.4": (
        "4x more filters in conv8",
        {"filters8": 1536},
        SIZES_4_2,
        """
        data 1x 0 0; conv1 1x 1x 1x; conv2 1x 1x 1x; conv3 1x 1x 1x; pool3 1x 1x 1x; conv4 1x 1x 1x; conv5 1x 1x 1x
        conv6 1x 1x 1x; pool6 1x 1x 1x; conv7 1x 1x 1x; conv8 4x 4x 4x; conv9 1x 4x 4x; pool9 1x 1x 1x
        conv10 1x 1x 1x; conv11 1x 1x 1x; conv12 1x 1x 1x; pool12 1x 1x 1x
        total 1.1x 1.1x 1.1x; amount 6.69GB 33.9MB 2.57TF
        """,
    ),
    "4.5": (
        "4x larger filters in conv7 (6x6)",
        {"kernel7": 6, "pad7": 2},
        "227 55 55 55 27 27 27 27 13 12 12 12 6 6 6 6 1",
        """
        data 1x 0 0; conv1 1x 1x 1x; conv2 1x 1x 1x; conv3 1x 1x 1x; pool3 1x 1x 1x; conv4 1x 1x 1x; conv5 1x 1x 1x
        conv6 1x 1x 1x; pool6 1x 1x 1x; conv7 0.8x 4x 3.4x; conv8 0.8x 1x 0.9x; conv9 0.8x 1x 0.9x; pool9 1x 1x 1x
        conv10 1x 1x 1x; conv11 1x 1x 1x; conv12 1x 1x 1x; pool12 1x 1x 1x
        total 1x 1.3x 1.3x; amount 5.82GB 41.0MB 2.99TF
        """,
    ),
    "4.6": (
        "4x more classes",
        {"classes": 4000},
        SIZES_4_2,
        """
        data 1x 0 0; conv1 1x 1x 1x; conv2 1x 1x 1x; conv3 1x 1x 1x; pool3 1x 1x 1x; conv4 1x 1x 1x; conv5 1x 1x 1x
        conv6 1x 1x 1x; pool6 1x 1x 1x; conv7 1x 1x 1x; conv8 1x 1x 1x; conv9 1x 1x 1x; pool9 1x 1x 1x
        conv10 1x 1x 1x; conv11 1x 1x 1x; conv12 4x 4x 4x; pool12 4x 1x 4x
        total 1x 1.4x 1.1x; amount 5.90GB 42.6MB 2.49TF
        """,
    ),
    "4.7": (
        "no pooling after conv3",
        {"pool3": False},
        "227 55 55 55 - 55 55 55 27 27 27 27 13 13 13 13 1",
        """
        data 1x 0 0; conv1 1x 1x 1x; conv2 1x 1x 1x; conv3 1x 1x 1x; conv4 4.1x 1x 4.1x; conv5 4.1x 1x 4.1x
        conv6 4.1x 1x 4.1x; pool6 4x 1x 4.3x; conv7 4.3x 1x 4.3x; conv8 4.3x 1x 4.3x; conv9 4.3x 1x 4.3x
        pool9 4.7x 1x 4x; conv10 4.7x 1x 4.7x; conv11 4.7x 1x 4.7x; conv12 4.7x 1x 4.7x; pool12 4x 1x 4x
        total 2.6x 1x 3.8x; amount 15.3GB 30.4MB 8.65TF
        """,
    ),
    "4.8": (
        "4x larger images (454x454)",
        {"image": 454},
        "454 111 111 111 55 55 55 55 27 27 27 27 13 13 13 13 1",
        """
        data 4x 0 0; conv1 4.1x 1x 4.1x; conv2 4.1x 1x 4.1x; conv3 4.1x 1x 4.1x; pool3 4.1x 1x 4.2x; conv4 4.1x 1x 4.2x
        conv5 4.1x 1x 4.2x; conv6 4.1x 1x 4.2x; pool6 4.3x 1x 4.3x; conv7 4.3x 1x 4.3x; conv8 4.3x 1x 4.3x
        conv9 4.3x 1x 4.3x; pool9 4.7x 1x 4.7x; conv10 4.7x 1x 4.7x; conv11 4.7x 1x 4.7x; conv12 4.7x 1x 4.7x
        pool12 4.7x 1x 4.7x; total 4.2x 1x 4.3x; amount 24.5GB 30.4MB 9.67TF
        """,
    ),
}

# network of the zoo and its settings: |D|, |W|, their ratio, forward and backward of a batch of 1024
TABLE_3_1: dict[str, tuple[str, dict[str, object], str]] = {
    "NiN": ("nin", {"image": 224}, "5800MB 30MB 195 6.7TF"),
    "AlexNet": ("alexnet", {}, "1680MB 249MB 10.2 7.0TF"),
    "GoogLeNet": ("googlenet-plain", {}, "19100MB 54MB 358 9.7TF"),
    "VGG-19": ("vgg19-plain", {}, "42700MB 575MB 71.7 120TF"),
}

# layer: output, parameters
TABLE_5_1 = """
conv1    111x111x96  14208
maxpool1 55x55x96    0
fire2    55x55x128   11920
fire3    55x55x128   12432
fire4    55x55x256   45344
maxpool4 27x27x256   0
fire5    27x27x256   49440
fire6    27x27x384   104880
fire7    27x27x384   111024
fire8    27x27x512   188992
maxpool8 13x12x512   0
fire9    13x13x512   197184
conv10   13x13x1000  513000
avgpool10 1x1x1000   0
total    -           1248424
"""

# where, settings of the zoo's squeezenet-plain, model size with MB = 2^20
MODEL_SIZES: tuple[tuple[str, dict[str, object], str], ...] = (
    ("table 5.3: no bypass", {}, "4.8MiB"),
    ("table 5.3: simple bypass", {"bypass": "simple"}, "4.8MiB"),
    ("table 5.3: complex bypass", {"bypass": "complex"}, "7.7MiB"),
    ("figure 5.3: squeeze ratio 0.125", {"squeeze": 0.125}, "4.8MiB"),
    ("figure 5.3: squeeze ratio 0.5", {"squeeze": 0.5}, "13MiB"),
    ("figure 5.3: squeeze ratio 0.75", {"squeeze": 0.75}, "19MiB"),
    ("figure 5.4: half of the expand filters 3x3", {"squeeze": 0.5, "large": 0.5}, "13MiB"),
)

# training on one NVIDIA K20 with Caffe, first rows of tables 3.2 and 3.3: epochs, hours
BASELINES = {"AlexNet": (100, 6.0 * 24), "NiN": (47, 5.8 * 24), "GoogLeNet": (64, 21 * 24)}
# network, workers, batch, epochs, hours, speed-up
TABLES_3_2_AND_3_3 = (
    ("NiN", 32, 256, 47, "11h", "13x"),
    ("NiN", 32, 1024, 47, "6h", "23x"),
    ("NiN", 128, 1024, 47, "3.6h", "39x"),
    ("GoogLeNet", 32, 1024, 64, "", "23x"),
    ("GoogLeNet", 32, 1024, 72, "23.4h", "20x"),
    ("GoogLeNet", 128, 1024, 72, "10.5h", "47x"),
    ("AlexNet", 8, 1024, 100, "16h", "7.7x"),
)
