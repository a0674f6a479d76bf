"""What enters by the core's sockets: each folder could be deleted with its tests."""
