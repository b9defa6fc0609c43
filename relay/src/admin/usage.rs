//! `GET /admin/usage`: the usage ledger.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::aside;
use crate::http::problem::problem_in;
use crate::state::Relay;
use crate::telemetry::usage::{Day, UsageFilter, UsageRow};

/// The filters; an absent one matches every row.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UsageQuery {
    /// The first day.
    since: Option<String>,
    /// The last day.
    until: Option<String>,
    /// The id or the name of a key.
    key: Option<String>,
    /// A model.
    model: Option<String>,
}

/// The response.
#[derive(Serialize)]
struct UsageReport<'a> {
    usage: Vec<UsageRow<'a>>,
    /// The time from which on the relay has counted, in RFC 3339.
    since: String,
    /// False if the sums are in memory only.
    stored: bool,
}

/// `GET /admin/usage`
pub(super) async fn usage(
    State(relay): State<Arc<Relay>>,
    query: Result<Query<UsageQuery>, QueryRejection>,
) -> Response {
    let filter = match query {
        Ok(Query(query)) => filter(query),
        Err(_) => Err(("", "the query may have since, until, key and model, each once")),
    };
    match filter {
        Ok(filter) => aside("application/json", move || report(&relay, &filter)).await,
        Err((field, problem)) => {
            let field = Some(field).filter(|field| !field.is_empty());
            problem_in(StatusCode::BAD_REQUEST, "invalid_query", problem, field)
        }
    }
}

/// Validates the filters. An error has the field and the problem.
fn filter(query: UsageQuery) -> Result<UsageFilter, (&'static str, &'static str)> {
    let day = |text: Option<String>, field, problem| {
        let text = text.filter(|text| !text.is_empty());
        text.map(|text| Day::parse(&text).ok_or((field, problem))).transpose()
    };
    let since = day(query.since, "since", "since must be a day in UTC, such as 2026-11-01")?;
    let until = day(query.until, "until", "until must be a day in UTC, such as 2026-11-30; it is included")?;
    if since.zip(until).is_some_and(|(since, until)| since > until) {
        return Err(("until", "until must not be before since"));
    }
    let text = |text: Option<String>| text.filter(|text| !text.is_empty());
    Ok(UsageFilter { since, until, key: text(query.key), model: text(query.model) })
}

fn report(relay: &Relay, filter: &UsageFilter) -> String {
    let (ledger, table) = (&relay.shared.usage, relay.shared.usage.table());
    let report = UsageReport {
        usage: table.rows(filter).collect(),
        since: humantime::format_rfc3339_seconds(ledger.since()).to_string(),
        stored: ledger.is_stored(),
    };
    serde_json::to_string(&report).unwrap_or_default()
}
