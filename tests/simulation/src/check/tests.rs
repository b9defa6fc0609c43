use super::*;
use crate::plan::KeyPlan;

/// One request for a stream to the only relay, without faults.
fn plan() -> Plan {
    let seeds = (0..).map(Plan::new).find(|plan| plan.relays == 1 && plan.requests[0].answer.streams);
    let mut plan = seeds.expect("a seed with such a plan");
    plan.requests.truncate(1);
    let request = &mut plan.requests[0];
    request.answer.trouble = Trouble::None;
    (request.leaves_after, request.reads_each) = (None, None);
    (request.key, request.client) = (None, None);
    request.conversation = None;
    plan.settings.places_by_cache = false;
    plan.faults.clear();
    plan.keys.clear();
    (plan.tick, plan.latency) = (Duration::from_millis(1), Duration::from_millis(1));
    (plan.workers[0].capacity, plan.workers[0].slot, plan.workers[0].is_old) = (1, None, false);
    plan.workers.truncate(1);
    plan
}

fn judged(plan: &Plan, events: &[(u64, Event)]) -> Vec<String> {
    let began = ["relay-0", "worker-0"].map(|host| (0, Event::Started(host.to_owned())));
    let entry = |(at, event): &(u64, Event)| Entry { at: Duration::from_secs(*at), event: event.clone() };
    let log_line = |(_, event): &(u64, Event)| match event {
        Event::Ended { nonce, how: Ending::Answered } => Some(completed(*nonce, "ok")),
        _ => None,
    };
    let lines: Vec<_> = events.iter().filter_map(log_line).collect();
    check(plan, &began.iter().chain(events).map(entry).collect::<Vec<_>>(), &lines)
}

/// Returns a relay's log line of a request that has ended.
fn completed(nonce: usize, outcome: &str) -> Line {
    let mut line = line("relay-0", "response complete", &client::id(nonce));
    line.text = format!("INFO response complete outcome={outcome} code=200");
    line
}

fn sent() -> (u64, Event) {
    (0, Event::Sent { nonce: 0 })
}

fn ended(at: u64, how: Ending) -> (u64, Event) {
    (at, Event::Ended { nonce: 0, how })
}

fn began(at: u64, execution: usize) -> (u64, Event) {
    (at, Event::Began { nonce: 0, worker: 0, execution })
}

fn line(host: &str, message: &str, id: &str) -> Line {
    Line {
        at: Duration::ZERO,
        host: host.to_owned(),
        message: message.to_owned(),
        request_id: Some(id.to_owned()),
        model: Some("alpha".to_owned()),
        key_id: None,
        text: message.to_owned(),
    }
}

#[test]
fn response_and_stated_overload_reasons_are_allowed() {
    for how in [Ending::Answered, Ending::Failed("queue_full".into()), Ending::BrokenStream("request_timeout".into())] {
        assert_eq!(judged(&plan(), &[sent(), began(1, 0), ended(2, how)]), Vec::<String>::new());
    }
}

#[test]
fn missing_duplicate_and_late_endings_are_found() {
    assert!(judged(&plan(), &[sent()])[0].contains("ended 0 times"));
    let twice = [sent(), ended(1, Ending::Answered), ended(2, Ending::Answered)];
    assert!(judged(&plan(), &twice)[0].contains("ended 2 times"));
    assert!(judged(&plan(), &[sent(), ended(9, Ending::Hung)])[0].contains("hung"));
    assert!(judged(&plan(), &[sent(), ended(80, Ending::Answered)])[0].contains("took 80s"));
}

#[test]
fn ending_without_valid_reason_is_found() {
    let one = |how| judged(&plan(), &[sent(), ended(1, how)]).join(" ");
    assert!(one(Ending::BrokenOff).contains("without a reason"));
    assert!(one(Ending::Unconnected).contains("lost its relay"));
    assert!(one(Ending::Failed("oops".into())).contains("which is none"));
    assert!(one(Ending::Failed("worker_lost".into())).contains("without a fault"));
    assert!(one(Ending::BackendError).contains("did not return"));
}

#[test]
fn absent_relay_excuses_only_its_own_clients() {
    let with = |host: &str| {
        let gone = [(1, Event::Gone(host.into())), (3, Event::Started(host.into()))];
        judged(&plan(), &[vec![sent()], gone.into(), vec![ended(2, Ending::Unconnected)]].concat())
    };
    assert_eq!(with("relay-0"), Vec::<String>::new());
    assert!(with("worker-0")[0].contains("lost its relay"));
}

#[test]
fn repeated_and_excess_execution_are_found() {
    let doubled = [sent(), began(1, 0), (2, Event::FirstByte { nonce: 0 }), began(3, 1), ended(4, Ending::Answered)];
    assert!(judged(&plan(), &doubled).join(" ").contains("begun again behind its first byte"));
    let many: Vec<_> = (0..9).map(|execution| (1, Event::Began { nonce: 0, worker: 0, execution })).collect();
    let many = [vec![sent()], many, vec![ended(9, Ending::Answered)]].concat();
    assert!(judged(&plan(), &many).join(" ").contains("was worked on 9 times"));
}

#[test]
fn lasting_excess_over_worker_capacity_is_found() {
    let second_ends = |at| {
        let work = [began(1, 0), began(2, 1), (at, Event::Finished { worker: 0, execution: 0 })];
        judged(&plan(), &[vec![sent()], work.into(), vec![ended(9, Ending::Answered)]].concat()).join(" ")
    };
    assert!(second_ends(8).contains("worker-0 had 2 requests"));
    assert_eq!(second_ends(2), "");
}

#[test]
fn overtaking_is_found_per_relay() {
    let of = |host| [line(host, "request submitted", "a"), line(host, "request submitted", "b")].to_vec();
    let sent = |host, id| line(host, "request dispatched", id);
    let right = [of("r"), vec![sent("r", "a"), sent("r", "b"), sent("r", "a")]].concat();
    assert_eq!(check_order(&right, 0), Vec::<String>::new());
    let wrong = [of("r"), vec![sent("r", "b"), sent("r", "a")]].concat();
    assert!(check_order(&wrong, 0)[0].contains("b overtook a"));
    assert_eq!(check_order(&wrong, 1), Vec::<String>::new());
    let twice =
        [of("r"), of("r"), vec![line("r", "request submitted", "c")], ["c", "b", "a"].map(|id| sent("r", id)).into()];
    assert!(check_order(&twice.concat(), 1)[0].contains("c overtook a"));
    assert!(check_order(&[sent("r", "c")], 0)[0].contains("never submitted"));
}

#[test]
fn requests_of_other_keys_may_overtake() {
    let of = |key: &str, id| Line { key_id: Some(key.to_owned()), ..line("r", "request submitted", id) };
    let sent = ["b", "a"].map(|id| line("r", "request dispatched", id));
    let [one, other] = ["one", "other"].map(|key| [vec![of("one", "a"), of(key, "b")], sent.to_vec()].concat());
    assert!(check_order(&one, 0)[0].contains("b overtook a"));
    assert_eq!(check_order(&other, 0), Vec::<String>::new());
}

#[test]
fn turn_that_leaves_idle_home_is_found() {
    let mut plan = plan();
    plan.settings.places_by_cache = true;
    plan.requests[0].conversation = Some(3);
    plan.requests.push(RequestPlan { nonce: 1, ..plan.requests[0].clone() });
    plan.requests.push(RequestPlan { nonce: 2, conversation: Some(4), ..plan.requests[0].clone() });
    let sent = |nonce, worker: &str| {
        let mut line = line("relay-0", "request dispatched", &client::id(nonce));
        line.text = format!("INFO request dispatched worker={worker} attempt=1");
        line
    };
    let wrong = |lines: &[Line]| homes::check_homes(&plan, lines).join(" ");
    assert_eq!(wrong(&[sent(0, "a"), completed(0, "ok"), sent(1, "a")]), "");
    assert!(wrong(&[sent(0, "a"), completed(0, "ok"), sent(1, "b")]).contains("its home, a, was idle"));
    assert_eq!(wrong(&[sent(0, "a"), sent(1, "b")]), "", "the home was busy");
    assert_eq!(wrong(&[sent(0, "a"), completed(0, "ok"), sent(2, "b")]), "", "another conversation");
}

#[test]
fn log_contradicting_client_is_found() {
    let judged = |how, outcome: &str| {
        let events = [Event::Sent { nonce: 0 }, Event::Ended { nonce: 0, how }];
        let entries = events.map(|event| Entry { at: Duration::ZERO, event });
        check(&plan(), &entries, &[completed(0, outcome)]).join(" ")
    };
    assert_eq!(judged(Ending::Answered, "ok"), "");
    assert!(judged(Ending::Answered, "cancelled").contains("the log states cancelled"));
    assert!(judged(Ending::BrokenStream("queue_timeout".into()), "cancelled").contains("the log states cancelled"));
    assert_eq!(judged(Ending::BrokenStream("queue_timeout".into()), "queue_timeout"), "");
}

#[test]
fn response_missing_from_logs_is_found() {
    let silent = |more: &[Event]| {
        let events = [&[Event::Sent { nonce: 0 }, Event::Ended { nonce: 0, how: Ending::Answered }], more].concat();
        let entries: Vec<_> = events.into_iter().map(|event| Entry { at: Duration::ZERO, event }).collect();
        check(&plan(), &entries, &[]).join(" ")
    };
    assert!(silent(&[]).contains("the log is silent"));
    assert_eq!(silent(&[Event::Gone("relay-0".into())]), "", "it may have been killed before it wrote that");
}

#[test]
fn truncated_document_is_allowed_only_after_fault() {
    let mut plan = plan();
    plan.requests[0].answer.streams = false;
    let broken = [sent(), ended(1, Ending::BrokenOff)];
    assert!(judged(&plan, &broken).join(" ").contains("ended prematurely without a reason"));
    plan.requests[0].answer.trouble = Trouble::ClosesMidway;
    assert_eq!(judged(&plan, &broken), Vec::<String>::new());
}

#[test]
fn logged_secret_is_found() {
    let mut line = line("r", "request submitted", "a");
    line.text.push_str(secrets::PROMPT);
    assert!(check_secrets(&[line]).is_some_and(|wrong| wrong.contains(secrets::PROMPT)));
}

#[test]
fn key_exceeding_its_permissions_is_found() {
    let with = |key: Option<KeyPlan>, events: &[(u64, Event)]| {
        let mut plan = plan();
        plan.requests[0].key = key.as_ref().map(|_| 0);
        plan.keys = vec![key.unwrap_or_default()];
        judged(&plan, events).join(" ")
    };
    let revoked = || Some(KeyPlan { revoked: true, ..KeyPlan::default() });
    let limited = || Some(KeyPlan { max_in_flight: Some(1), ..KeyPlan::default() });
    let other_model = || Some(KeyPlan { models: Some(vec!["delta"]), ..KeyPlan::default() });
    let failed = |code: &str| [sent(), ended(1, Ending::Failed(code.into()))];
    let answered = [sent(), began(1, 0), ended(2, Ending::Answered)];

    for refused in [None, revoked()] {
        assert_eq!(with(refused, &failed("invalid_api_key")), "");
    }
    assert_eq!(with(other_model(), &failed("model_forbidden")), "");
    assert_eq!(with(limited(), &failed("key_limit")), "");
    assert_eq!(with(limited(), &answered), "");

    for refused in [None, revoked(), other_model()] {
        assert!(with(refused, &answered).contains("was worked on"));
    }
    let revoked_and_limited = KeyPlan { revoked: true, max_in_flight: Some(1), ..KeyPlan::default() };
    assert!(with(Some(revoked_and_limited), &failed("key_limit")).contains("its key may expect"));
    assert!(with(other_model(), &failed("invalid_api_key")).contains("its key may expect"));
    assert!(with(Some(KeyPlan::default()), &failed("model_forbidden")).contains("its key may expect"));
    assert!(with(Some(KeyPlan::default()), &failed("key_limit")).contains("its key may expect"));
}

#[test]
fn lasting_excess_over_key_limit_is_found() {
    let first_ends = |at| {
        let mut plan = plan();
        plan.keys = vec![KeyPlan { max_in_flight: Some(1), ..KeyPlan::default() }];
        plan.requests[0].key = Some(0);
        plan.requests.push(RequestPlan { nonce: 1, ..plan.requests[0].clone() });
        let events = [
            sent(),
            (0, Event::Sent { nonce: 1 }),
            (1, Event::FirstByte { nonce: 0 }),
            (2, Event::FirstByte { nonce: 1 }),
            ended(at, Ending::Answered),
            (9, Event::Ended { nonce: 1, how: Ending::Answered }),
        ];
        judged(&plan, &events).join(" ")
    };
    assert!(first_ends(8).contains("ran 2 requests of a key that may have 1"));
    assert_eq!(first_ends(2), "");
}

#[test]
fn kept_connection_is_excused_only_by_later_restart() {
    let with = |first: Ending, second: Ending| {
        let mut plan = plan();
        plan.requests[0].client = Some(0);
        plan.requests.push(RequestPlan { nonce: 1, ..plan.requests[0].clone() });
        let events = [
            sent(),
            ended(1, first),
            (2, Event::Gone("relay-0".into())),
            (3, Event::Started("relay-0".into())),
            (20, Event::Sent { nonce: 1 }),
            (21, Event::Ended { nonce: 1, how: second }),
        ];
        judged(&plan, &events).join(" ")
    };
    // The connection was made before the restart, and is used again only now.
    assert_eq!(with(Ending::Answered, Ending::Unconnected), "");
    let broken = Ending::BrokenStream("worker_lost".to_owned());
    assert!(!with(broken, Ending::Unconnected).contains("lost its relay"));
    // Anything that arrives over it after that comes from the new relay.
    assert!(with(Ending::Answered, Ending::BrokenOff).contains("without a reason"));
    // The first one ended its connection, so this one is from after the restart.
    assert!(with(Ending::Left, Ending::Unconnected).contains("lost its relay"));
    assert_eq!(with(Ending::Left, Ending::Answered), "");
}
