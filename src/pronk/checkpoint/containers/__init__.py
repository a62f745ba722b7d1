"""What named tensors lie in: bytes of a file, checked before they are believed."""
