//! Tests that need their own network and hosts file: names with several addresses, and connections that fail silently.

mod dead_address;
mod dead_network;
mod dns;

use modelrelay_harness::namespace::{Namespace, RESOLVER, inside};
