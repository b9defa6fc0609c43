//! What needs a network and a hosts file of its own: names with several addresses, and connections that go dead without
//! a word.

mod dead_address;
mod dead_network;
mod dns;

use modelrelay_harness::namespace::{Namespace, RESOLVER, inside};
