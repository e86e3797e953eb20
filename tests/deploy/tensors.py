"""Safetensors files of small whole numbers, for the tests that run commands of documents."""
import json
import struct


def write(path, key, rows, columns):
    data = b"".join(struct.pack("<f", (row * 7 + column * 3) % 5 - 2) for row in range(rows) for column in range(columns))
    header = json.dumps({key: {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
