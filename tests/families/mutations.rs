//! What a wrong config or tensor does.
