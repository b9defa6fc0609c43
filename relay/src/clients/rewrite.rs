//! The two changes that the relay makes to a request's body: the model's name in place of an alias, and the request for
//! the usage of a stream. The copy is charged to the memory budget like the original, which is dropped.

use bytes::Bytes;
use http::request::Parts;
use modelrelay_protocol::error::ApiError;

use super::auth::Caller;
use super::inference::LONG_READ_BYTES;
use super::parse;
use super::usage_request::Edit;
use crate::net::budget::{Holder, Purpose, Reservation};
use crate::state::Relay;
use crate::system::blocking;

/// The routes on which backends report the usage of a stream only on request.
const ROUTES: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Replaces an alias.
pub fn rename(
    relay: &Relay,
    holder: Holder,
    body: &Bytes,
    routed: &parse::Routed,
    model: &str,
) -> Result<Bytes, ApiError> {
    let reservation = reserve(relay, holder, body.len() as u64)?;
    Ok(reservation.hold(parse::with_model(body, routed, model)))
}

/// Makes the body of a stream request its usage. Returns true if it did not before, so that the client does not expect
/// it. If the larger body does not fit, it stays, and the usage is estimated.
pub async fn request_usage(relay: &Relay, (caller, parts): (&Caller, &Parts), body: &mut Bytes) -> bool {
    let config = relay.shared.config.load();
    if !config.request_usage || !ROUTES.contains(&parts.uri.path()) {
        return false;
    }
    let edit = if body.len() < LONG_READ_BYTES {
        Edit::of(body)
    } else {
        let body = body.clone();
        blocking::run(move || Edit::of(&body)).await.ok().flatten()
    };
    let Some(edit) = edit else { return false };
    let bytes = edit.len_of(body) as u64;
    if bytes > config.max_request_bytes {
        return false;
    }
    let Ok(reservation) = reserve(relay, caller.holder(relay, parts), bytes) else { return false };
    *body = reservation.hold(edit.apply(body));
    true
}

/// Reserves memory for the copy of a body.
fn reserve(relay: &Relay, holder: Holder, bytes: u64) -> Result<Reservation, ApiError> {
    let mut reservation = relay.shared.budget.open_for(holder);
    reservation.grow_for_copy(bytes, Purpose::of_body(bytes))?;
    Ok(reservation)
}
