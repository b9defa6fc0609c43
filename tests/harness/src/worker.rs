//! A worker played by hand.
