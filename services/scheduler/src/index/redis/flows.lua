-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- Returns the checkpoint and, if there is one, the names of all flows.
local found = mark()
if found[2] then
  for i, flow in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    found[2 + i] = flow
  end
end
return found
