"""Small datasets on disk in the layouts of the real ones, with real JPEG bytes."""

import io
import json

import numpy as np
from PIL import Image


def jpeg(seed, width=40, height=30, mode="RGB"):
    """The bytes of a JPEG of smooth noise; every seed gives another one."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    image.save(buffer, format="JPEG")
    return buffer.getvalue()


def write_file(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def make_voc(root, images, sets):
    """A devkit: `images` maps a name to its objects (class, difficult, xmin, ymin, xmax, ymax)."""
    for seed, (name, objects) in enumerate(images.items()):
        items = "".join(
            f"<object><name>{label}</name><difficult>{difficult}</difficult>"
            f"<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
            f"<bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
            for label, difficult, x0, y0, x1, y1 in objects
        )
        size = "<size><width>40</width><height>30</height><depth>3</depth></size>"
        write_file(root / "Annotations" / f"{name}.xml", f"<annotation>{size}{items}</annotation>")
        write_file(root / "JPEGImages" / f"{name}.jpg", jpeg(seed))
    for name, members in sets.items():
        write_file(root / "ImageSets" / "Main" / f"{name}.txt", "".join(f"{member}\n" for member in members))


def make_coco(root, sets, categories):
    """`sets` maps a set to its images, {id: [(category id, x, y, width, height)]}."""
    for name, images in sets.items():
        content = {
            "categories": [{"id": number, "name": label} for number, label in categories],
            "images": [
                {"id": image, "file_name": f"COCO_{name}_{image:012d}.jpg", "width": 40, "height": 30}
                for image in images
            ],
            "annotations": [
                {"image_id": image, "category_id": item[0], "bbox": item[1:], "segmentation": [[1.0] * 8]}
                for image, items in images.items()
                for item in items
            ],
        }
        write_file(root / "annotations" / f"instances_{name}.json", json.dumps(content))
        for image in images:
            write_file(root / name / f"COCO_{name}_{image:012d}.jpg", jpeg(image))


def make_imagenet(root, per_class=4, flat_val=False):
    """Three classes in ImageNet's layout; validation image i + 1 is of class i % 3."""
    classes = ["n01440764", "n01443537", "n01484850"]
    for number, name in enumerate(classes):
        for i in range(per_class):
            write_file(root / "train" / name / f"{name}_{i + 10}.JPEG", jpeg(100 * number + i))
    for i in range(6):
        folder = root / "val" if flat_val else root / "val" / classes[i % 3]
        write_file(folder / f"ILSVRC2012_val_{i + 1:08d}.JPEG", jpeg(1000 + i))
    return classes
