"""In which files state lies: formats that run nothing when they are read, and are never half there.

``tensor_file`` writes and reads files of tensors in the safetensors format, with checksums, piece by piece;
``encoding`` turns plain values into JSON and back; ``manifest`` makes the files of all ranks current in one move.
This room knows bytes and names; it knows nothing of parameters, ranks' shares or optimizers.
"""

from shardopt.files.encoding import decode, encode
from shardopt.files.manifest import (
    commit,
    file_name,
    new_save,
    read_manifest,
    remove_others,
    sync_folder,
)
from shardopt.files.tensor_file import (
    TensorEntry,
    TensorFile,
    TensorFileWriter,
    dtype_name,
    in_file_order,
    is_pickled,
)

__all__ = [
    "TensorEntry",
    "TensorFile",
    "TensorFileWriter",
    "commit",
    "decode",
    "dtype_name",
    "encode",
    "file_name",
    "in_file_order",
    "is_pickled",
    "new_save",
    "read_manifest",
    "remove_others",
    "sync_folder",
]
