//! Relay and worker together, in front of a fake backend: the client's view, and the backend's.

mod backend_loss;
mod bodies;
mod cancel;
mod dialects;
mod headers;
mod homes;
mod ipv6;
mod keep_alive;
mod model_details;
mod outliers;
mod relays;
mod requested_usage;
mod rollout;
mod rotation;
mod secrecy;
mod support;
mod tls;
mod tokens;
mod traces;
mod worker_loss;
mod zones;
