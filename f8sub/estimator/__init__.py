"""What float8 would gain, predicted from shapes: seconds, bytes on the wire, memory."""
