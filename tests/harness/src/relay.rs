//! A relay under test.
