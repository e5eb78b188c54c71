#include "agent.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

void answer(int64_t request, const char *fields, const char *body, size_t size) {
    struct bytes head = {0};
    addf(&head, "{\"id\":%lld", (long long)request);
    add(&head, fields, strlen(fields));
    add(&head, "}", 1);
    if (head.size > MOST_HEAD) answer_error(request, EFBIG);
    else send_frame(here.control, &head, body, size);
    drop(&head);
}

void answer_error(int64_t request, int error) {
    char text[32] = "";
    if (error) snprintf(text, sizeof text, ",\"errno\":%d", error);
    answer(request, text, NULL, 0);
}

void say(const char *text) {
    struct bytes head = {(char *)text, strlen(text), 0};
    send_frame(here.control, &head, NULL, 0);
}

void tell_events(int64_t watch, const char *events) {
    struct bytes head = {0};
    addf(&head, "{\"watch\":%lld,\"events\":[", (long long)watch);
    add(&head, events, strlen(events));
    add(&head, "]}", 2);
    send_frame(here.control, &head, NULL, 0);
    drop(&head);
}
