//! One behaviour per test, with the exact effects on one screen.
