//! The protocol between relay and worker, and the rules that both must agree on.
//!
//! No I/O, no clock, no runtime: messages are values, and functions that need the time receive it as an argument. Both
//! programs and every test can therefore use all of it, and none can drift from the other.

pub mod cidr;
pub mod config_hash;
pub mod credit;
pub mod dialect;
pub mod error;
pub mod event_stream;
pub mod frame;
pub mod grants;
pub mod headers;
pub mod homes;
pub mod limits;
pub mod location;
pub mod message;
pub mod model_details;
pub mod multipart;
pub mod names;
pub mod nearness;
pub mod outbox;
pub mod paths;
pub mod proxies;
pub mod queue_position;
pub mod rate_limit;
pub mod rename;
pub mod secret;
pub mod text;
pub mod units;
pub mod usage;
pub mod version;
