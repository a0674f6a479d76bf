"""Parts of a ``Float8Tensor`` without quantizing anew: ``split``, ``cat``, indexing."""
