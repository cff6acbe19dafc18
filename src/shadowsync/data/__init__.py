"""Sources of click data, the reader and its leases."""
