"""Work of hostile input, in processes within limits that the system keeps."""
