"""Container images as roots of local sandboxes, without any daemon.

sources.py  reads images: `docker save` archives, OCI layouts (folder or archive), a daemon, a registry
unpack.py   makes one layer of an image a lower directory of overlayfs
store.py    keeps the unpacked layers, shared and content-addressed, and finds images by name or digest
gc.py       removes what nobody refers to and, when the disk is nearly full, what was used longest ago
"""

from swe_rl.sandbox.oci.image_config import Image
from swe_rl.sandbox.oci.store import ImageStore, default_store

__all__ = ["Image", "ImageStore", "default_store"]
