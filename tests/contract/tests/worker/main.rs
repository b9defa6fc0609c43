//! The worker as a black box, between fake relays and backends. One module per part of the contract; one binary,
//! because linking a binary per module would take longer than running the tests.

mod backend_faults;
mod backend_health;
mod cancel;
mod capacity;
mod check;
mod connect;
mod credit;
mod drain;
mod forwarding;
mod homes;
mod links;
mod memory;
mod old_relay;
mod probe;
mod proxies;
mod registration;
mod relay_headers;
mod reload;
mod secrecy;
mod secret_rotation;
mod settings;
mod streaming;
mod tls;
mod token_file;
mod usage;
