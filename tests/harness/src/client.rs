//! A small HTTP client that shows what really came over the wire.
