use serde_json::{Value, json};

use super::*;

fn meta(entries: &Value) -> ObjectMeta {
    serde_json::from_value(json!({"managedFields": entries})).unwrap()
}

fn entry(manager: &str, subresource: Option<&str>, second: u8) -> Value {
    json!({
        "manager": manager, "operation": "Update", "subresource": subresource, "apiVersion": "apps/v1",
        "time": format!("2026-01-01T00:00:{second:02}Z"), "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:replicas": {}}},
    })
}

fn rival(manager: &str, second: u8) -> Option<Rival> {
    Rival::of(&meta(&json!([entry(manager, Some("scale"), second)])))
}

const HPA: &str = "kube-controller-manager";

fn hpa(second: u8) -> Option<Rival> {
    rival(HPA, second)
}

fn left(manager: &str) -> Option<String> {
    Some(format!("left to {manager}"))
}

fn settled(manager: &str) -> Option<String> {
    Some(format!("settled with {manager}"))
}

/// A history of observations and their results.
#[derive(Clone)]
struct Looks {
    rivals: Rivals,
    start: Instant,
}

impl Looks {
    fn new() -> Self {
        Self { rivals: Rivals::default(), start: Instant::now() }
    }

    fn at(&mut self, second: u64, rival: Option<Rival>, has: i32, ours: i32) -> Option<String> {
        match self.rivals.observe(self.start + Duration::from_secs(second), rival, has, ours)? {
            Dispute::Left(rival) => left(&rival.manager),
            Dispute::Settled(rival) => settled(&rival.manager),
        }
    }
}

#[test]
fn a_rival_is_whoever_took_the_number_over() {
    let ours = json!({
        "manager": "modelrelay-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}, "f:template": {}}},
    });
    let without =
        json!({"manager": "modelrelay-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:template": {}}}});
    let status = json!({
        "manager": "kube-controller-manager", "subresource": "status", "fieldsV1": {"f:status": {"f:replicas": {}}},
    });
    assert_eq!(Rival::of(&meta(&json!([ours, status]))), None);
    // Both wrote the same number.
    assert_eq!(Rival::of(&meta(&json!([ours, entry("kubectl", Some("scale"), 1)]))), rival("kubectl", 1));
    assert_eq!(Rival::of(&meta(&json!([without, status]))), None);
    let found =
        Rival::of(&meta(&json!([without, status, entry("kubectl", Some("scale"), 1), entry("argocd", None, 2)])));
    assert_eq!(found.map(|rival| rival.describe()), Some("field manager argocd".to_owned()));
    let described = |manager: &str| rival(manager, 1).unwrap().describe();
    assert_eq!(
        described("kube-controller-manager"),
        "a HorizontalPodAutoscaler (field manager kube-controller-manager)"
    );
    assert_eq!(described("keda-operator"), "KEDA (field manager keda-operator)");
    // Other writes of the controller manager do not scale.
    assert!(!Rival::of(&meta(&json!([entry("kube-controller-manager", None, 1)]))).unwrap().autoscaler);
}

#[test]
fn a_number_that_the_pool_asked_for_before_is_no_dispute() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, None, 2, 5), None);
    assert_eq!(looks.at(1, None, 5, 5), None);
}

#[test]
fn a_person_is_corrected_once_and_that_is_said_for_a_while() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, rival("kubectl", 1), 5, 2), settled("kubectl"));
    assert_eq!(looks.at(1, None, 2, 2), settled("kubectl"));
    assert_eq!(looks.at(2, None, 2, 3), settled("kubectl"), "another number of the pool's changes nothing about it");
    assert_eq!(looks.at(600, None, 3, 3), None);
}

#[test]
fn who_undoes_a_correction_keeps_the_number_until_there_is_peace() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, rival("argocd", 1), 5, 2), settled("argocd"));
    assert_eq!(looks.at(1, None, 2, 2), settled("argocd"));
    assert_eq!(looks.at(60, rival("argocd", 2), 5, 2), left("argocd"));
    assert_eq!(looks.at(61, rival("argocd", 2), 5, 2), left("argocd"));
    // The operator applies that number while it has no other owner.
    assert_eq!(looks.at(62, None, 5, 2), left("argocd"));
    // Another write restarts the wait.
    assert_eq!(looks.at(300, rival("argocd", 3), 6, 2), left("argocd"));
    assert_eq!(looks.at(899, None, 6, 2), left("argocd"));
    assert_eq!(looks.at(900, None, 6, 2), settled("argocd"));
    assert_eq!(looks.at(960, rival("argocd", 4), 6, 2), left("argocd"));
}

#[test]
fn an_autoscaler_keeps_its_number_until_the_pool_asks_for_another() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, hpa(1), 4, 2), left(HPA));
    assert_eq!(looks.at(86_400, None, 4, 2), left(HPA));
    assert_eq!(looks.at(86_415, hpa(2), 6, 2), left(HPA));
    // It was pointed at the pool, and writes there.
    assert_eq!(looks.at(86_430, None, 6, 5), settled(HPA));
    assert_eq!(looks.at(86_431, None, 5, 5), settled(HPA));
    assert_eq!(looks.at(90_000, None, 5, 7), None, "the pool's next number is nobody else's");
}

#[test]
fn an_autoscaler_that_comes_by_the_pools_number_has_not_gone() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, hpa(1), 4, 2), left(HPA));
    assert_eq!(looks.at(15, hpa(2), 2, 2), left(HPA));
    assert_eq!(looks.at(30, hpa(3), 5, 2), left(HPA));
    // If the pool itself gets that number, or a user resets the Deployment to the pool's, there is no conflict.
    assert_eq!(looks.clone().at(31, None, 5, 5), None);
    assert_eq!(looks.clone().at(31, rival("kubectl", 4), 2, 2), None);
    assert_eq!(looks.at(45, hpa(5), 2, 2), left(HPA));
    assert_eq!(looks.at(630, None, 2, 2), None);
}

#[test]
fn an_autoscaler_that_undoes_the_pools_next_number_is_left_alone_again() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, hpa(1), 4, 2), left(HPA));
    assert_eq!(looks.at(10, None, 4, 3), settled(HPA));
    assert_eq!(looks.at(11, None, 3, 3), settled(HPA));
    assert_eq!(looks.at(25, hpa(2), 4, 3), left(HPA));
    // A pool whose number changes continuously corrects it at most once in ten minutes.
    assert_eq!(looks.at(30, None, 4, 1), left(HPA));
    assert_eq!(looks.at(10_000, None, 4, 3), left(HPA));
}

#[test]
fn a_pool_that_asks_for_another_number_than_both_wrote_gets_it() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, hpa(1), 4, 4), None);
    assert_eq!(looks.at(1, hpa(1), 4, 5), None);
    // The API server has not accepted it yet.
    assert_eq!(looks.at(2, hpa(1), 4, 5), None);
    assert_eq!(looks.clone().at(3, hpa(2), 4, 5), left(HPA), "written since");
    assert_eq!(looks.at(3, None, 5, 5), None);
}

#[test]
fn a_correction_that_could_not_be_written_was_not_undone() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, rival("kubectl", 1), 5, 2), settled("kubectl"));
    assert_eq!(looks.at(1, rival("kubectl", 1), 5, 2), settled("kubectl"));
    assert_eq!(looks.at(2, rival("kubectl", 2), 5, 2), left("kubectl"));
}

#[test]
fn a_new_leader_leaves_an_autoscalers_number_alone_too() {
    assert_eq!(Looks::new().at(0, hpa(1), 4, 2), left(HPA));
}
