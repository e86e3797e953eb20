/*
 * Operators that share a workspace: two of them launch in turn, on two nodes of two ranks. README.md maps the steps to
 * comm/workspace_turn.h.
 *
 * The workspace of a rank has three places. In the launches of one operator they are a neighbour's sum, what this rank
 * sends and what it receives; in the other's they are the same, one place further on. So what one leaves or still moves
 * is where the other writes. Epochs count the launches of both, modulo 4. Each launch is a turn: those of one operator in
 * a row are in banks.pml.
 *
 * -DONE_NODE: two ranks that send nothing; a turn then goes by the ends of launches.
 * -DM_...: mutants, each of which must fail (models.txt).
 */
#define EPOCHS 4
#ifdef ONE_NODE
#define RANKS 2
#else
#define RANKS 4
#endif
#define NEXT(e) (((e) + 1) % EPOCHS)
#define LAST(e) (((e) + EPOCHS - 1) % EPOCHS)
#define NEIGHBOUR(r) ((r) % 2 == 0 -> (r) + 1 : (r) - 1)
#define PEER(r) (((r) + 2) % 4)
#define SEEN(word) ((word) == e || (word) == NEXT(e))
#ifdef ONE_NODE
#define PLACE(r, what, e) ((r) * 3) /* there is nothing but the neighbour's sum */
#else
#define PLACE(r, what, e) ((r) * 3 + ((what) + (e) % 2) % 3)
#endif
#define SUM 0
#define SENT 1
#define RECEIVED 2
#define NOBODYS EPOCHS

byte place[RANKS * 3] = NOBODYS; /* the epoch whose bytes lie there */
byte ready[RANKS] = 0;           /* the neighbour's sum is there */
byte arrived[RANKS] = 0;         /* the rail peer's bytes are there */
byte ended[RANKS] = 0;           /* finished: visible to the neighbour */
byte behind[RANKS] = 0;            /* WorkspaceTurn::left */
byte turn[RANKS] = 0;            /* the rail peer's node says so: WorkspaceTurn::flag */

/* What a rank sends: NOTHING, POSTED (the daemon will read it), READ (on its way), LANDED (its flag is not shown). */
#define NOTHING 0
#define POSTED 1
#define READ 2
#define LANDED 3
byte data[RANKS] = NOTHING;
byte carries[RANKS] = 0;
byte news[RANKS] = NOTHING;
byte says[RANKS] = 0;

/* take_turn() */
inline take_turn() {
#ifdef ONE_NODE
#ifndef M_NO_LOCAL_WAIT
  ended[NEIGHBOUR(me)] == LAST(e) || ended[NEIGHBOUR(me)] == e;
#endif
#else
  data[me] == NOTHING; /* wait_completed() of all lanes */
  behind[me] = e;
#ifndef M_NO_LOCAL_WAIT
#ifdef M_SIGNALS_BEFORE_LOCALS_LEFT
  atomic { news[me] == NOTHING -> news[me] = LANDED; says[me] = e };
#endif
  SEEN(behind[NEIGHBOUR(me)]);
#endif
#ifndef M_SIGNALS_BEFORE_LOCALS_LEFT
  atomic { news[me] == NOTHING -> news[me] = LANDED; says[me] = e };
#endif
#ifndef M_NO_RAIL_WAIT
  SEEN(turn[me]);
#endif
#endif
  skip
}

proctype rank(byte me) {
  byte e = 1;
  do
  :: take_turn();
    atomic { place[PLACE(NEIGHBOUR(me), SUM, e)] = e };
    ready[NEIGHBOUR(me)] = e;
#ifndef ONE_NODE
    place[PLACE(me, SENT, e)] = e;
    atomic { data[me] == NOTHING -> data[me] = POSTED; carries[me] = e };
#endif
    SEEN(ready[me]);
    assert(place[PLACE(me, SUM, e)] == e);
#ifndef ONE_NODE
    SEEN(arrived[me]);
    assert(place[PLACE(me, RECEIVED, e)] == e);
    /* Its neighbour has what it needs, too: collect, pull. */
    SEEN(arrived[NEIGHBOUR(me)]);
    assert(place[PLACE(NEIGHBOUR(me), RECEIVED, e)] == e && place[PLACE(NEIGHBOUR(me), SUM, e)] == e);
#endif
progress_launched:
    atomic { ended[me] = e; e = NEXT(e) }
  od
}

#ifndef ONE_NODE
/* What rank `from` sends, in its own time. */
proctype network(byte from) {
  byte value = 0;
end:
  do
  :: atomic { data[from] == POSTED -> value = place[PLACE(from, SENT, carries[from])]; data[from] = READ }
  :: atomic { data[from] == READ -> place[PLACE(PEER(from), RECEIVED, carries[from])] = value; value = 0; data[from] = LANDED }
  :: atomic { data[from] == LANDED -> arrived[PEER(from)] = carries[from]; data[from] = NOTHING }
  :: atomic { news[from] == LANDED -> turn[PEER(from)] = says[from]; news[from] = NOTHING }
  od
}
#endif

init {
  byte r = 0;
  atomic {
    do
    :: r < RANKS ->
      run rank(r);
#ifndef ONE_NODE
      run network(r);
#endif
      r++
    :: else -> break
    od
  }
}
