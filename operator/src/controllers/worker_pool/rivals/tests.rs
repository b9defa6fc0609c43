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
            overruled @ Dispute::Overruled { .. } => panic!("{overruled:?}"),
        }
    }
}

#[test]
fn latest_other_owner_of_replicas_is_rival() {
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
fn replicas_previously_requested_by_pool_are_no_dispute() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, None, 2, 5), None);
    assert_eq!(looks.at(1, None, 5, 5), None);
}

#[test]
fn user_is_corrected_once_and_temporarily_reported() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, rival("kubectl", 1), 5, 2), settled("kubectl"));
    assert_eq!(looks.at(1, None, 2, 2), settled("kubectl"));
    assert_eq!(looks.at(2, None, 2, 3), settled("kubectl"), "another number of the pool's changes nothing about it");
    assert_eq!(looks.at(600, None, 3, 3), None);
}

#[test]
fn writer_undoing_correction_keeps_replicas_until_quiet() {
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
fn autoscaler_keeps_replicas_until_pool_requests_others() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, hpa(1), 4, 2), left(HPA));
    assert_eq!(looks.at(86_400, None, 4, 2), left(HPA));
    assert_eq!(looks.at(86_415, hpa(2), 6, 2), left(HPA));
    // It was pointed at the pool, and writes there.
    assert_eq!(looks.at(86_430, None, 6, 5), settled(HPA));
    assert_eq!(looks.at(86_431, None, 5, 5), settled(HPA));
    assert_eq!(looks.at(90_000, None, 5, 7), None, "the pool's next number belongs to no other manager");
}

#[test]
fn autoscaler_matching_pool_replicas_is_still_present() {
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
fn autoscaler_undoing_next_replicas_is_left_alone() {
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
fn pool_requesting_third_number_gets_it() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, hpa(1), 4, 4), None);
    assert_eq!(looks.at(1, hpa(1), 4, 5), None);
    // The API server has not accepted it yet.
    assert_eq!(looks.at(2, hpa(1), 4, 5), None);
    assert_eq!(looks.clone().at(3, hpa(2), 4, 5), left(HPA), "written since");
    assert_eq!(looks.at(3, None, 5, 5), None);
}

#[test]
fn unwritten_correction_is_not_treated_as_undone() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, rival("kubectl", 1), 5, 2), settled("kubectl"));
    assert_eq!(looks.at(1, rival("kubectl", 1), 5, 2), settled("kubectl"));
    assert_eq!(looks.at(2, rival("kubectl", 2), 5, 2), left("kubectl"));
}

#[test]
fn new_leader_leaves_replicas_to_autoscaler() {
    assert_eq!(Looks::new().at(0, hpa(1), 4, 2), left(HPA));
}
